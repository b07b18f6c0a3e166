"""Stages of an evaluation: functions of a context and of the results of earlier stages."""
