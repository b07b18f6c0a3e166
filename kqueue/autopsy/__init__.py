"""Find the smallest shape and the plainest input on which a kernel still fails, and write a file that shows it.

:class:`~kqueue.autopsy.shrink.Autopsy` says which problems to judge next, and is told what became of them. It runs
nothing and asks nobody: :mod:`kqueue.autopsy.run` has them judged by a fleet or by a local judge, and an agent's
tool by the fleet's HTTP server. So foreign code runs where it always does, in the judge's sealed processes.
"""
