"""What went wrong between a client and the daemon, as one of our exceptions: what happened, where, what to do."""

from __future__ import annotations

import errno
import resource

from torchwcache.errors import (
    DaemonError,
    DaemonTimeoutError,
    DaemonUnavailable,
    EntryNotFoundError,
    FileLimitError,
    ProtocolError,
    ProtocolVersionError,
    SegmentError,
    UntrustedSocketError,
    WeightCacheError,
)
from torchwcache.wire.messages import PROTOCOL_VERSION, Failure

__all__ = ["from_failure", "gone", "hung", "is_file_limit", "no_files_left", "not_a_daemon", "wrong_version"]

_CLASSES: dict[str, type[WeightCacheError]] = {
    "bad_segments": SegmentError,
    "bad_ticket": DaemonError,
    "fd_limit": FileLimitError,
    "forbidden": UntrustedSocketError,
    "not_found": EntryNotFoundError,
    "stopping": DaemonUnavailable,
    "timeout": DaemonTimeoutError,
}
"""By code of the :class:`Failure`; any other code means that the two sides disagree about the protocol."""


def from_failure(path: str, failure: Failure, what: str) -> WeightCacheError:
    """The exception for a daemon's :class:`Failure`; ``code`` and ``path`` are attributes of it."""
    if failure.code == "protocol_version":
        return wrong_version(path, failure.protocol)
    cls = _CLASSES.get(failure.code, ProtocolError)
    return cls(f"the daemon at {path} answered `{what}`: {failure.message}", path=path, code=failure.code)


def gone(path: str, when: str) -> DaemonUnavailable:
    """The stream ended."""
    return DaemonUnavailable(
        f"the daemon at {path} went away when {when}: it was stopped or killed. Memory that is mapped stays valid; connect again,"
        " which starts a new daemon in mode `daemon`",
        path=path,
    )


def hung(path: str, what: str, timeout_s: float) -> DaemonTimeoutError:
    """The daemon is there but does nothing."""
    return DaemonTimeoutError(
        f"the daemon at {path} did not {what} in time (timeout {timeout_s:g} s): it hangs or is stopped. Look at the log beside its"
        " socket, or kill it and start another",
        path=path,
    )


def not_a_daemon(path: str, error: ProtocolError) -> ProtocolError:
    """Something else listens at the path."""
    return ProtocolError(
        f"{path} is not served by a torchwcache daemon: {error}. Stop what listens there, or set TORCHWCACHE_SOCKET"
        " to another path",
        path=path,
    )


def wrong_version(path: str, daemon: object) -> ProtocolVersionError:
    """The daemon is of another protocol version."""
    return ProtocolVersionError(
        f"the daemon at {path} speaks protocol version {daemon}, this process version {PROTOCOL_VERSION}: stop it"
        " (`torchwcache stop` of its own version, or kill it) and start one of this version, or set TORCHWCACHE_SOCKET to"
        " another path",
        path=path,
        daemon=daemon,
        client=PROTOCOL_VERSION,
    )


def is_file_limit(error: OSError) -> bool:
    """Whether a call failed for want of file descriptors, here or in flight."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)


def no_files_left(path: str, *, needed: int = 1) -> FileLimitError:
    """This process has no room for more descriptors."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return FileLimitError(
        f"this process has no file descriptors left for {needed} more while talking to the daemon at {path}: its limit is {limit}"
        f" (`ulimit -n`; it may be raised to {most})",
        path=path,
        limit=limit,
        needed=needed,
    )
