"""Postgres and Valkey as child processes, and the one-machine fleet that uses them.

It imports the store, settings and the broker. Start with :mod:`~kqueue.local.fleet`, which `kqueue up` runs.
"""
