"""Discovery of GPUs, their health, their shared memory, and the environment of a measurement."""
