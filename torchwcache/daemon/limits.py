"""Every bound of the daemon, in one place (``docs/protocol.md`` lists them). Pure data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ConnectionLimits", "StoreLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """How long producers may take, and how much is remembered.

    Attributes:
        silence_s: A producer that says nothing for this long is taken for dead as soon as somebody waits for it.
        production_s: The same, however much it talks.
        refusals: How many refused fingerprints are remembered.
    """

    silence_s: float = 60.0
    production_s: float = 3600.0
    refusals: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """How long a client may do nothing.

    Attributes:
        first_request_s: Between connecting and the end of the first request.
        frame_s: Between the first and the last byte of a later request.
        write_s: Without taking any of a reply.
        idle_s: Between requests, for a connection without lease, production or wait.
    """

    first_request_s: float = 10.0
    frame_s: float = 30.0
    write_s: float = 30.0
    idle_s: float = 300.0
