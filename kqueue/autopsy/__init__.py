"""Find the smallest shape and the simplest input on which a kernel fails, and write a file that reproduces it.

:class:`~kqueue.autopsy.shrink.Autopsy` chooses the next problems to judge from the results so far. It runs nothing. The
callers judge: :mod:`kqueue.autopsy.run` with a fleet or a local judge, and an agent's tool with the fleet's HTTP
server. So untrusted code runs only in the judge's sealed processes.
"""
