"""Tuning of a kernel's numeric parameters.

===========================================  =====================================================
:mod:`~kqueue.tuning.sites`                  finds and replaces the values that a source names
:mod:`~kqueue.tuning.space`                  parses the requested values into configurations
:mod:`~kqueue.tuning.halving`                chooses the next evaluations and the winner
===========================================  =====================================================

This package neither judges nor records. The callers do: `kqueue tune` (:mod:`kqueue.search.tuning`) and the tool of
`kqueue mcp`.
"""
