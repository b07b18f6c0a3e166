"""The fleet's record in Postgres: tables, and the queries that other packages call by name.

It imports SQLAlchemy, the contract and the states, and nothing else of a fleet: neither settings, Celery nor HTTP.
Start with :mod:`~kqueue.store.models` for the tables and :mod:`kqueue.store.evaluations` for an evaluation's life.
"""
