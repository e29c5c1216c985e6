"""Whether a descriptor is a sealed memfd: asked by the daemon before a commit and by clients before they map. Imports no torch."""

from __future__ import annotations

import errno
import fcntl
import os

from torchwcache.errors import SegmentError

__all__ = ["REQUIRED_SEALS", "check_sealed"]

REQUIRED_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""Together: the bytes and their number never change again. ``F_SEAL_FUTURE_WRITE`` would leave existing writers writing."""

_NAMES = {
    fcntl.F_SEAL_SEAL: "F_SEAL_SEAL",
    fcntl.F_SEAL_SHRINK: "F_SEAL_SHRINK",
    fcntl.F_SEAL_GROW: "F_SEAL_GROW",
    fcntl.F_SEAL_WRITE: "F_SEAL_WRITE",
}


def check_sealed(fd: int, nbytes: int) -> None:
    """Make sure that a descriptor is an immutable memfd of at least ``nbytes`` bytes.

    A file that could still shrink would kill every process that maps it with SIGBUS.

    Raises:
        SegmentError: It is not; the message says in which respect.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
    except OSError as error:
        reason = "it is no memfd" if error.errno == errno.EINVAL else (error.strerror or "unknown error")
        raise SegmentError(f"segment (fd {fd}) cannot be shared: {reason}", nbytes=nbytes) from error
    missing = [name for seal, name in _NAMES.items() if not seals & seal]
    if missing:
        raise SegmentError(
            f"segment (fd {fd}) is not immutable, it lacks {', '.join(missing)}: seal it before it is committed", nbytes=nbytes
        )
    if size < nbytes:
        raise SegmentError(f"segment (fd {fd}) has {size} bytes, its entry says {nbytes}", nbytes=nbytes)
