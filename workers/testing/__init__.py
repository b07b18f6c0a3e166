"""A plugin of pytest that runs each test module in a fresh process with a fresh CUDA context.

==================================  ==================================================================
:mod:`kqueue.pytest_plugin`         the options, and their use by the controlling pytest
:mod:`~workers.testing.groups`      groups of tests that share a process, and the orders to such processes
:mod:`~workers.testing.controller`  the controlling pytest, which runs groups concurrently and gets their reports
:mod:`~workers.testing.claims`      checks of a process's messages before they reach pytest
:mod:`~workers.testing.host`        this host: its slots, their locks, and jobs, which are processes of tests
:mod:`~workers.testing.reaper`      the parent of a job's process, which ends it with all that it started
:mod:`~workers.testing.fleet`       a fleet: a group's tests as an evaluation, its reports from the verdict
:mod:`~workers.testing.repository`  the files that are sent to a fleet
:mod:`~workers.testing.sealed`      the program in a fleet's sealed process
:mod:`~workers.testing.child`       the program of a process of tests: pytest on the tests of one group
:mod:`~workers.testing.context`     checks of a process's CUDA contexts
:mod:`~workers.testing.sanitizer`   a second run of failed tests under compute-sanitizer
==================================  ==================================================================

The controlling pytest collects, prints, counts and writes as usual. The children send it the reports that pytest makes.
The repository is trusted like in a run of pytest without this plugin. See docs/pytest.md.
"""
