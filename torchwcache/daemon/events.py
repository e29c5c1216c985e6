"""What happens to the daemon, and what is to be done about it: the alphabet of ``store.py``. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torchwcache.wire.messages import Reply, Request

__all__ = [
    "CloseFds",
    "Disconnected",
    "Effect",
    "Event",
    "Exit",
    "Received",
    "Send",
    "SendStatus",
    "Shutdown",
    "Tick",
]

# ---- events ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A connection sent a request. ``fds`` come with a commit only, one for each segment, and have been checked."""

    client: int
    request: Request
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection ended, for whatever reason. Its number is not used again."""

    client: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The daemon was asked to exit by a signal."""


Event: TypeAlias = Received | Disconnected | Tick | Shutdown

# ---- effects -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a reply. The tokens are lent."""

    client: int
    reply: Reply
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SendStatus:
    """Send the daemon's status, most of which the shell knows."""

    client: int


@dataclass(frozen=True, slots=True)
class CloseFds:
    """Close descriptors; they do not occur again."""

    fds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exit:
    """Deliver what was sent so far, within a bound, before the effects that follow are carried out; then exit."""


Effect: TypeAlias = Send | SendStatus | CloseFds | Exit
