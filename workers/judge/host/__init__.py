"""What the judge asks of the machine: processes, uids, locks, the flight recorder."""
