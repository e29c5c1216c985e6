"""Who is producing what, and who waits for it. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torchwcache.wire.messages import Attach, Waiting

__all__ = ["Production", "ProductionTable", "Waiter"]


@dataclass(slots=True, eq=False, kw_only=True)
class Waiter:
    """A client that waits for somebody else's production."""

    client: int
    attach: Attach
    deadline_s: float


@dataclass(slots=True, eq=False, kw_only=True)
class Production:
    """One entry in the making.

    Attributes:
        ticket: What the producer shows when it commits; void once the production was handed on.
        owner: The producer's connection.
        attach: What the producer asked for last.
        keys: Every key by which clients may join: the full one, a provisional one, or both once the producer has hashed the files.
        heard_s: When the producer last gave a sign of life.
        told_s: When the waiting clients were last told how it goes.
        waiters: In order of arrival.
    """

    ticket: int
    owner: int
    attach: Attach
    keys: set[str]
    started_s: float
    heard_s: float
    told_s: float
    phase: str = "starting"
    done: int = 0
    total: int = 0
    waiters: dict[int, Waiter] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """The device that the entry will live on."""
        return self.attach.device

    def report(self, now_s: float) -> Waiting:
        """What those who wait are told."""
        elapsed_s = max(now_s - self.started_s, 0.0)
        return Waiting(phase=self.phase, done=self.done, total=self.total, elapsed_s=elapsed_s)

    def suits(self, waiter: Waiter, key: str) -> bool:
        """Whether a waiter wanted the entry that this production turned out to be.

        A waiter with a provisional key has the same files under its eyes as the producer, so it takes what they hashed to. One
        with a full key wants exactly that: the checkpoint may have changed before the producer read it.
        """
        return waiter.attach.provisional or waiter.attach.key == key

    def restart(self, *, ticket: int, owner: int, attach: Attach, now_s: float) -> None:
        """Give the production to another producer."""
        self.ticket, self.owner, self.attach = ticket, owner, attach
        self.started_s = self.heard_s = self.told_s = now_s
        self.phase, self.done, self.total = "starting", 0, 0


class ProductionTable:
    """All productions, found by any of their keys."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], Production] = {}

    def __iter__(self) -> Iterator[Production]:
        return iter(dict.fromkeys(self._by_key.values()))

    def get(self, key: str, device: str) -> Production | None:
        """The production that a client with this key would join."""
        return self._by_key.get((key, device))

    def has_family(self, family: str, device: str) -> bool:
        """Whether something is being produced that may turn out to be the wanted entry once the files are hashed."""
        return any(p.attach.family == family and p.device == device and not p.attach.provisional for p in self)

    def add(self, production: Production) -> None:
        """Register a production under its keys."""
        for key in production.keys:
            assert (key, production.device) not in self._by_key
            self._by_key[key, production.device] = production

    def remove(self, production: Production) -> None:
        """Take a production off the table."""
        for key in production.keys:
            del self._by_key[key, production.device]

    def also(self, production: Production, keys: set[str]) -> None:
        """Let clients find a production under further keys, which no other one has."""
        for key in keys - production.keys:
            assert (key, production.device) not in self._by_key
            self._by_key[key, production.device] = production
        production.keys |= keys
