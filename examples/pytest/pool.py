"""A memory pool that all modules of a process share, like GPU memory. Buffers are adjacent, and writes are not checked."""

import atexit
import ctypes
import os

_MEMORY = (ctypes.c_double * 4096)()
_used = 0


def buffer(count):
    """Return the next ``count`` doubles of the pool."""
    global _used
    taken = (ctypes.c_double * count).from_buffer(_MEMORY, 8 * _used)
    _used += count
    return taken


def write(target, index, value):
    """Write to an index without a bounds check, like a kernel."""
    ctypes.cast(target, ctypes.POINTER(ctypes.c_double))[index] = value


def unload_at_exit(table):
    """Check a table when the process exits, and abort if it was overwritten, like an unload of compiled modules."""

    def unload():
        if list(table) != [float(number) for number in range(len(table))]:
            os.write(2, b"pool: a module's table was overwritten\n")
            os.abort()

    atexit.register(unload)
