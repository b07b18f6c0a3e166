"""The judge's access to the host: processes, uids, locks, the build store and the status page."""
