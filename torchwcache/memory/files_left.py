"""The error of a segment for which there is no file descriptor left, whatever kind of memory it is in. Imports no torch."""

from __future__ import annotations

import errno
import resource

from torchwcache.errors import FileLimitError

__all__ = ["file_limit_error"]


def file_limit_error(what: str, error: OSError) -> FileLimitError | None:
    """The error to raise when the system's own says that a table of descriptors is full; ``None`` when it says something else.

    Args:
        what: What was being done, such as ``"make a segment"``.
        error: The system's.
    """
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    whose = "this process" if error.errno == errno.EMFILE else "the system"
    return FileLimitError(
        f"cannot {what}: {whose} has no file descriptors left (ulimit -n is {soft}, at most {hard}); one per segment is needed: "
        "raise it with `ulimit -n`",
        soft=soft,
        hard=hard,
    )
