"""What the daemon holds: entries, who leases them, and when they may be freed. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from torchwcache.wire.messages import EntryInfo, OtherEntry

__all__ = ["Entry", "EntryTable"]


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """One committed module state. Only ``used_s``, ``hits``, ``leases`` and the two marks ever change.

    Attributes:
        fds: Opaque tokens of the segments' descriptors; given back by :class:`EntryTable` exactly once, when it is freed.
        leases: Number of open connections that use it.
        superseded: Another content of the same checkpoint has been committed in its slot.
        evicted: Freed at the end of the last lease, and not handed out any more.
    """

    key: str
    device: str
    slot: str
    family: str
    fields: bytes
    manifest: bytes
    memory: Literal["memfd", "cuda"]
    segments: tuple[int, ...]
    label: str
    fds: tuple[int, ...]
    created_s: float
    used_s: float
    hits: int = 0
    leases: int = 0
    superseded: bool = False
    evicted: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(self.segments)

    def info(self, now_s: float) -> EntryInfo:
        """The entry as ``torchwcache status`` shows it."""
        return EntryInfo(
            key=self.key,
            device=self.device,
            slot=self.slot,
            label=self.label,
            memory=self.memory,
            nbytes=self.nbytes,
            segments=len(self.segments),
            leases=self.leases,
            age_s=max(now_s - self.created_s, 0.0),
            idle_s=0.0 if self.leases else max(now_s - self.used_s, 0.0),
            hits=self.hits,
            superseded=self.superseded,
        )


class EntryTable:
    """All entries. Methods that free entries return them; their descriptors are the caller's to close, once."""

    def __init__(self) -> None:
        self._visible: dict[tuple[str, str], Entry] = {}
        self._evicted: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._visible) + len(self._evicted)

    def __iter__(self) -> Iterator[Entry]:
        """All entries, oldest first, those that only wait for their last lease included."""
        return iter(sorted([*self._visible.values(), *self._evicted.values()], key=lambda entry: entry.created_s))

    def get(self, key: str, device: str) -> Entry | None:
        """The entry that a client may have."""
        return self._visible.get((key, device))

    def others(self, slot: str, device: str, key: str) -> tuple[OtherEntry, ...]:
        """Entries of the slot under another key: what a client that found nothing may have expected to find."""
        return tuple(
            OtherEntry(key=entry.key, fields=entry.fields)
            for entry in self._visible.values()
            if entry.slot == slot and entry.device == device and entry.key != key
        )

    def has_family(self, family: str, device: str) -> bool:
        """Whether an entry differs from a wanted one in the checkpoint's content at most."""
        return any(entry.family == family and entry.device == device for entry in self._visible.values())

    def add(self, entry: Entry) -> list[Entry]:
        """Make an entry visible, then supersede older content of the same checkpoint; returns what is freed by that."""
        place = (entry.key, entry.device)
        assert place not in self._visible
        self._visible[place] = entry
        older = [
            other
            for other in self._visible.values()
            if other is not entry and (other.slot, other.device, other.family) == (entry.slot, entry.device, entry.family)
        ]
        for other in older:
            other.superseded = True
        return self._free(other for other in older if not other.leases)

    def lease(self, entry: Entry, now_s: float) -> None:
        """Keep an entry alive. One that was superseded is wanted again, so its content is current again."""
        entry.leases += 1
        entry.used_s = now_s
        entry.superseded = False

    def release(self, entry: Entry, now_s: float) -> list[Entry]:
        """End one lease; returns the entry if that frees it."""
        assert entry.leases > 0
        entry.leases -= 1
        entry.used_s = now_s
        return self._free([entry] if not entry.leases and (entry.superseded or entry.evicted) else [])

    def evict(self, entries: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Hide entries from clients; returns those that are freed at once, and those that are leased still."""
        chosen = list(entries)
        pending = [entry for entry in chosen if entry.leases]
        for entry in pending:
            if not entry.evicted:
                entry.evicted = True
                del self._visible[entry.key, entry.device]
                self._evicted[id(entry)] = entry
        return self._free(entry for entry in chosen if not entry.leases), pending

    def oldest_unleased(self, device: str, nbytes: int) -> list[Entry]:
        """Unleased entries on a device, least recently used first, until they add up to ``nbytes`` or there are no more."""
        chosen: list[Entry] = []
        missing = nbytes
        for entry in sorted(self._visible.values(), key=lambda entry: entry.used_s):
            if missing > 0 and entry.device == device and not entry.leases:
                chosen.append(entry)
                missing -= entry.nbytes
        return chosen

    def clear(self) -> list[Entry]:
        """Free everything, leases or not: the daemon exits, and clients keep what they mapped."""
        return self._free(list(self))

    def _free(self, entries: Iterable[Entry]) -> list[Entry]:
        freed = list(entries)
        for entry in freed:
            if entry.evicted:
                del self._evicted[id(entry)]
            else:
                del self._visible[entry.key, entry.device]
        return freed
