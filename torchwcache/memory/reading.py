"""Files into memory at an address, without the GIL and without another copy. Imports no torch."""

from __future__ import annotations

import ctypes
import os

__all__ = ["read_exactly", "view_of_memory"]

_READ_NBYTES = 64 << 20
"""One read at most: a signal such as Ctrl-C is served between two of them."""
_PYBUF_WRITE = 0x200

# Not ``numpy()``: torch does not require it. Not an array type of ctypes either: each size makes a new class.
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype = ctypes.py_object
_from_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


def view_of_memory(address: int, nbytes: int) -> memoryview:
    """A writable view of ``nbytes`` bytes at an address, which the caller keeps valid."""
    return _from_memory(address, nbytes, _PYBUF_WRITE)  # type: ignore[no-any-return]


def read_exactly(fd: int, offset: int, view: memoryview) -> None:
    """Fill ``view`` with the bytes of a file from ``offset`` on.

    Raises:
        EOFError: The file ends before it is full.
    """
    done, nbytes = 0, len(view)
    while done < nbytes:
        got = os.preadv(fd, [view[done : done + _READ_NBYTES]], offset + done)
        if got == 0:
            raise EOFError(f"the file ends at byte {offset + done}, {nbytes - done} bytes before the tensor is full")
        done += got
