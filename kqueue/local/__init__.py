"""Postgres and Valkey as child processes, and the one-machine fleet that uses them."""
