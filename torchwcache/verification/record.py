"""The record of a verification: what a registry's entry can cite as evidence. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import xxhash

from torchwcache.module.difference import Difference
from torchwcache.verification.comparison import Compared

__all__ = ["VerificationRecord", "record_id"]

SCHEMA = 1
"""Of the JSON form."""


def record_id(facts: Mapping[str, Any]) -> str:
    """The id of a record, from all else that it says: a record that was changed afterwards does not have its id any more."""
    rest = {name: value for name, value in facts.items() if name != "id"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"parity-{xxhash.xxh3_128_hexdigest(text.encode())}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationRecord:
    """A fresh load in one process against a fresh attach in another.

    Attributes:
        checkpoint: As it was given.
        model: What else describes the model: the command's arguments that are not the usual ones.
        label: The module's class.
        fingerprint: The cached entry's.
        slot: The cached entry's.
        deep: Whether the model was run.
        inputs: Where the inputs came from; ``None`` when they were generated.
        compared: How much was compared.
        ignored: Patterns of paths that were left out, with the reason.
        versions: Of everything that took part.
        seconds: What the load and the attach took, each in its process.
        differences: All of them.
        when: When it ended.
    """

    checkpoint: str
    model: Mapping[str, Any]
    label: str
    fingerprint: str
    slot: str
    deep: bool
    inputs: str | None
    compared: Compared
    ignored: Mapping[str, str]
    versions: Mapping[str, str]
    seconds: Mapping[str, float]
    differences: tuple[Difference, ...]
    when: datetime

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, with the ``id``."""
        facts: dict[str, Any] = {
            "schema": SCHEMA,
            "equal": self.equal,
            "checkpoint": self.checkpoint,
            "model": dict(self.model),
            "label": self.label,
            "fingerprint": self.fingerprint,
            "slot": self.slot,
            "deep": self.deep,
            "inputs": (self.inputs or "generated") if self.deep else None,
            "compared": {**self.compared.as_dict(), "opaque": list(self.compared.opaque)},
            "ignored": dict(self.ignored),
            "versions": dict(self.versions),
            "seconds": {side: round(seconds, 6) for side, seconds in self.seconds.items()},
            "when": self.when.astimezone(UTC).isoformat(timespec="seconds"),
            "differences": [{"path": d.path, "what": d.what, "expected": d.expected, "found": d.found} for d in self.differences],
        }
        return {"id": record_id(facts), **facts}
