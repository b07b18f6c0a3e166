"""Sleeps when it is imported, for ever: ``reference_timeout``."""

time.sleep(1000)
