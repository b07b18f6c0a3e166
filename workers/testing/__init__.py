"""Tests of a repository, a fresh process and a fresh CUDA context for each module: a plugin of pytest.

================================  ====================================================================
:mod:`~workers.testing.plugin`      the options, and what the controlling pytest does with them
:mod:`~workers.testing.groups`      which tests share a process, and what is told of them
:mod:`~workers.testing.controller`  runs groups side by side, and hands their reports to pytest
:mod:`~workers.testing.claims`      what a process says, checked before pytest is told of it
:mod:`~workers.testing.host`      this host: GPUs and slots, and their locks, which a fleet here shares
:mod:`~workers.testing.job`         one process of tests here: its start, its messages, its end
:mod:`~workers.testing.reaper`      the process between: it ends a job's process with all that it started
:mod:`~workers.testing.fleet`       a fleet: a group's tests as an evaluation, its reports from the verdict
:mod:`~workers.testing.repository`  the files that travel there
:mod:`~workers.testing.sealed`      what runs there, in a sealed process
:mod:`~workers.testing.child`       what runs in a process of tests, here or there: pytest on the tests of one group
:mod:`~workers.testing.context`     whether the CUDA contexts of a process still work
:mod:`~workers.testing.sanitizer`   what failed, once more under compute-sanitizer
================================  ====================================================================

The controlling pytest collects as always, and prints, counts and writes what it always does: a child sends it the
reports that pytest makes. The repository is trusted as it is where pytest runs without this: see docs/pytest.md.
"""
