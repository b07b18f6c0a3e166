"""Tuning of the values that a kernel names, and tournaments of kernels.

This package neither judges nor records. The callers do: the runs of :mod:`kqueue.search.tuning`, `kqueue tournament` on
this machine, and the tool of `kqueue mcp`.
"""
