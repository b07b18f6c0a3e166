"""Honest: torch's own GELU on 16 MB.

What kernels on this problem are compared with.
"""
