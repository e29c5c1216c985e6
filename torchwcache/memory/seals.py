"""What makes a memfd an immutable segment. Imports no torch: the daemon checks it at commit, every client before mapping."""

from __future__ import annotations

import fcntl
import os

from torchwcache.errors import SegmentError

__all__ = ["REQUIRED_SEALS", "check_sealed"]

REQUIRED_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""``F_SEAL_FUTURE_WRITE`` is no substitute for ``F_SEAL_WRITE``: mappings that were writable before it stay so."""

_NAMES = {
    fcntl.F_SEAL_SEAL: "SEAL",
    fcntl.F_SEAL_SHRINK: "SHRINK",
    fcntl.F_SEAL_GROW: "GROW",
    fcntl.F_SEAL_WRITE: "WRITE",
}


def check_sealed(fd: int, nbytes: int) -> None:
    """Check that a descriptor is a memfd which nobody can change any more, of at least ``nbytes`` bytes.

    Raises:
        SegmentError: It is not; the message says what is missing.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
    except OSError as error:
        raise SegmentError(f"descriptor {fd} is not a memfd segment: {error}", fd=fd) from error
    if missing := [name for seal, name in _NAMES.items() if not seals & seal]:
        raise SegmentError(f"the segment is not immutable: seals {', '.join(missing)} are missing", fd=fd)
    if size < nbytes:
        raise SegmentError(f"the segment has {size} bytes, its entry says {nbytes}", fd=fd, nbytes=size)
