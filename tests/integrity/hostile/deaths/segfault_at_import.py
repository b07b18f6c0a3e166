"""Reads address 0 when it is imported: ``reference_error``."""

ctypes.string_at(0)
