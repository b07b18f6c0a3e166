"""Memory that all modules of a process share, as a GPU's is: buffers lie side by side, and writes are not checked."""

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
    """Write where an index leads, as a kernel does: beyond the buffer's end too."""
    ctypes.cast(target, ctypes.POINTER(ctypes.c_double))[index] = value


def unload_at_exit(table):
    """Give a table back when the process ends, as compiled modules are unloaded; a table that was hit ends it."""

    def unload():
        if list(table) != [float(number) for number in range(len(table))]:
            os.write(2, b"pool: a module's table was overwritten\n")
            os.abort()

    atexit.register(unload)
