"""Stages of an evaluation: functions of a context and of earlier results, which return frozen results."""
