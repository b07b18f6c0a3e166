"""Honest: torch's own GELU.

The plainest kernel there is.
"""
