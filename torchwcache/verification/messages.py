"""What ``torchwcache verify`` and its two child processes say to each other. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from torchwcache.verification.description import ModuleDescription, OutputFacts

__all__ = ["Answer", "Failure", "Order"]


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a child is to do.

    Attributes:
        side: ``attach`` what is cached, or ``load`` from disk.
        model: The command's arguments that describe the model.
        socket: The daemon's socket.
        deep: Run the model, too.
        inputs: See ``inputs_from``.
    """

    side: Literal["attach", "load"]
    model: dict[str, Any]
    socket: str
    deep: bool
    inputs: str | None


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="answer"):
    """What a child found.

    Attributes:
        description: The module.
        outputs: Its answer; empty unless it was asked for.
        source: Where the module came from, as in an attach's report.
        fingerprint: The entry's; empty for a load.
        slot: The entry's.
        label: A short name of the model.
        versions: Of everything that took part.
        seconds: How long it took to get the module.
    """

    description: ModuleDescription
    outputs: dict[str, OutputFacts]
    source: str
    fingerprint: str
    slot: str
    label: str
    versions: dict[str, str]
    seconds: float


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="failure"):
    """Why a child found nothing: the error's classes, from its own to its bases, its text, and its traceback."""

    kinds: tuple[str, ...]
    text: str
    trace: str
