"""Adapters for code that expects another evaluator's interface. They translate and do not judge.

- :mod:`~kqueue.integrations.modal_like`: an evaluator with the interface of evaluators on Modal.
- :mod:`~kqueue.integrations.local`: an evaluator that starts a fleet on this machine if none runs.
- :mod:`~kqueue.integrations.trace`: a guide and an agent for Trace's optimizers.
- :mod:`~kqueue.integrations.rl`: rewards for batches, and an environment with ``reset`` and ``step``.
- :mod:`~kqueue.integrations.verifiers`, :mod:`~kqueue.integrations.openenv`: the same for these two packages.
- :mod:`~kqueue.integrations.verl`, :mod:`~kqueue.integrations.nemo_gym`: rewards for these two packages.
- :mod:`~kqueue.integrations.openevolve`: an evaluator for OpenEvolve.
- :mod:`~kqueue.integrations.kernelbench`: KernelBench's own function.
"""
