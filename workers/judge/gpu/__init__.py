"""GPUs: finding them, recording the environment of a measurement, and checking their health."""
