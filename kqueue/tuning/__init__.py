"""Tuning a kernel: which numbers of its source can be changed, which are tried, and which win.

===========================================  ====================================================
:mod:`~kqueue.tuning.sites`                  where a source names a value, and how it is changed
:mod:`~kqueue.tuning.space`                  the values that are asked for
:mod:`~kqueue.tuning.halving`                what is judged next, and what has won
===========================================  ====================================================

Nothing here judges or records. `kqueue tune` does (:mod:`kqueue.search.tuning`), and so does the tool of `kqueue mcp`.
"""
