"""The judge's access to the host: processes, uids, locks, the build store and the status page.

It imports no torch. Start with :mod:`~workers.judge.host.linux` for processes, and :mod:`~workers.judge.host.turns` and
:mod:`~workers.judge.host.exclusive` for a device's locks.
"""
