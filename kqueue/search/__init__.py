"""The search for a fast kernel. Kernels are proposed and judged, and new ones are made from the best.

Tuning is a search too: Optuna proposes values for names in one kernel (:mod:`kqueue.tuning`).

===========================================  ====================================================
:mod:`~kqueue.search.plan`                   the options of a search
:mod:`~kqueue.search.proposers`              proposers of kernels: a model, a command, a folder. Prompts
:mod:`~kqueue.search.population`             scores of a verdict, the choice of the best kernels and the next parents
:mod:`~kqueue.search.run`                    the engine of both, and the search, step by step
:mod:`~kqueue.search.tuning`                 a tuning run, a tournament on a fleet
:mod:`~kqueue.search.results`                a run's best kernels, its curve, and Weights & Biases
===========================================  ====================================================

The rows in Postgres are the record of a run (:mod:`kqueue.store.searches`), from which any process can resume it.
"""
