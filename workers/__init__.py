"""The worker side of a fleet: the supervisor of a host, its Celery workers, and the judge.

It imports :mod:`kqueue`, which never imports it. Start with :mod:`workers.fleet` for the supervisor,
:mod:`workers.app` for the Celery task, and :mod:`workers.judge.api` for the judge.
"""
