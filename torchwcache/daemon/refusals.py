"""Fingerprints that cannot be cached, remembered so that nobody loads a model just to find that out again. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from torchwcache.wire.messages import Refused

__all__ = ["Refusals"]


class Refusals:
    """A bounded memory; the one that was asked for least recently is forgotten first.

    Args:
        capacity: How many keys are remembered.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_key: OrderedDict[str, tuple[str, Refused]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: str) -> Refused | None:
        """Why this key was refused, if it was."""
        found = self._by_key.get(key)
        if found is None:
            return None
        self._by_key.move_to_end(key)
        return found[1]

    def remember(self, keys: Iterable[str], *, slot: str, refused: Refused) -> None:
        """Remember a refusal under each of its keys."""
        for key in keys:
            self._by_key[key] = (slot, refused)
            self._by_key.move_to_end(key)
        while len(self._by_key) > self._capacity:
            self._by_key.popitem(last=False)

    def forget(self, chosen: Callable[[str, str], bool]) -> int:
        """Forget those whose key and slot are chosen; returns how many."""
        keys = [key for key, (slot, _) in self._by_key.items() if chosen(key, slot)]
        for key in keys:
            del self._by_key[key]
        return len(keys)
