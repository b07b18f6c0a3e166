"""Doors for code that calls an evaluator by another interface. Each translates, and none judges.

- :mod:`~kqueue.integrations.modal_like`: an evaluator with the interface of those that run on Modal.
- :mod:`~kqueue.integrations.local`: one that starts a fleet on this machine where none runs.
- :mod:`~kqueue.integrations.trace`: a guide and an agent for Trace's optimizers.
- :mod:`~kqueue.integrations.rl`: rewards for batches, and an environment with ``reset`` and ``step``.
- :mod:`~kqueue.integrations.verifiers`, :mod:`~kqueue.integrations.openenv`: the same for these two packages.
"""
