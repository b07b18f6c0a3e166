"""The trusted judge: it controls the sealed processes, compares outputs, measures times and decides outcomes.

It imports the contract of :mod:`kqueue` and torch, but neither Postgres, Redis, Celery nor settings. Start with
:mod:`~workers.judge.api`, the caller's side, and :mod:`workers.judge.pipeline.run`, one evaluation.
"""
