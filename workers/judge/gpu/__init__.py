"""Discovery of GPUs, their health, their shared memory, and the environment of a measurement.

It imports NVML, torch and the contract. Start with :mod:`~workers.judge.gpu.devices`, and
:mod:`~workers.judge.gpu.booking` for memory that several slots share.
"""
