"""The judge's access to the machine: processes, uids, locks, the flight recorder."""
