"""Searching for a fast kernel: kernels are proposed, judged, and the best are what the next are made from.

Tuning is such a search too: Optuna proposes values for names in one kernel (:mod:`kqueue.tuning`).

===========================================  ====================================================
:mod:`~kqueue.search.plan`                   all that is asked of a search
:mod:`~kqueue.search.proposers`              who writes kernels: a model, a command, a folder
:mod:`~kqueue.search.prompts`                what a proposer is told
:mod:`~kqueue.search.metrics`                scores of a verdict
:mod:`~kqueue.search.population`             which kernels are the best, and which are next
:mod:`~kqueue.search.run`                    the search itself, step by step
:mod:`~kqueue.search.judging`                what every run does with its kernels' evaluations
:mod:`~kqueue.search.tuning`                 a tuning run
:mod:`~kqueue.search.results`                a run's best kernels, its curve, and Weights & Biases
===========================================  ====================================================

Rows in Postgres are the record of a run (:mod:`kqueue.store.searches`); any process can go on from them.
"""
