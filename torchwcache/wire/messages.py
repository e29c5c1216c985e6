"""The messages of the protocol, and the rules by which they may change (``docs/protocol.md``). Imports no torch.

Every request is answered by exactly one reply; only :class:`Attach` may be answered by any number of :class:`Waiting` first.
Manifests and fingerprint fields travel as opaque bytes: the daemon never looks inside.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, Union

import msgspec
from msgspec import Meta

__all__ = [
    "PROTOCOL_VERSION",
    "WAITING_INTERVAL_S",
    "Abort",
    "Aborted",
    "Attach",
    "Commit",
    "Committed",
    "DaemonStatus",
    "EntryInfo",
    "Entries",
    "Evict",
    "Evicted",
    "Failure",
    "Hit",
    "ListEntries",
    "MakeRoom",
    "Miss",
    "OtherEntry",
    "Produce",
    "Progress",
    "Refused",
    "Refuse",
    "Reply",
    "Request",
    "Status",
    "Stop",
    "Stopping",
    "Waiting",
]

PROTOCOL_VERSION = 1
"""Sent in every frame header. A daemon answers another version with :class:`Failure` ``protocol_version``, which never changes."""

Hex: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
"""An xxh3-128 digest."""
Name: TypeAlias = Annotated[str, Meta(max_length=4096)]
Text: TypeAlias = Annotated[str, Meta(max_length=65536)]
Nbytes: TypeAlias = Annotated[int, Meta(ge=0, le=2**60)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=7 * 86400)]
"""A bound that a peer asks for."""
Age: TypeAlias = Annotated[float, Meta(ge=0)]
"""A time that has passed; entries may well be older than any bound."""

WAITING_INTERVAL_S = 1.0
"""A daemon tells a waiting client at least this often that it is alive: silence of several intervals means that it hangs."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    pass


# ---- requests ----------------------------------------------------------------------------------------------------------------


class Attach(_Message, frozen=True, tag="attach"):
    """Give me this entry; if there is none, let me (or whoever is at it) produce it.

    Attributes:
        key: The fingerprint; or, with ``provisional``, the fingerprint computed from the stat identity of the files, for a client
            that has not hashed the checkpoint yet.
        device: ``"cpu"``, or a device UUID. Key and device together name an entry.
        slot: What an operator would call the same model: path or repo id, role, device, ranks.
        family: Digest of all fingerprint fields but the checkpoint's content.
        fields: Canonical bytes of the fingerprint's fields, given to clients that find this entry in their slot.
        provisional: See ``key``.
        produce: Whether this client is able to produce the entry.
        wait_s: How long to wait for another producer, at most.

    A producer that was given a ticket for a provisional key, and has hashed the checkpoint since, attaches once more on the same
    connection, by the full key: its production moves there, together with everybody who waits for it. In every other case a
    connection that holds a lease or a ticket, or waits, cannot attach again.
    """

    key: Hex
    device: Name
    slot: Name
    family: Hex
    fields: bytes
    provisional: bool = False
    produce: bool = True
    wait_s: Seconds = 600.0


class Progress(_Message, frozen=True, tag="progress"):
    """A producer is alive, and in this phase. Not answered."""

    ticket: int
    phase: Name
    done: Nbytes = 0
    total: Nbytes = 0


class Commit(_Message, frozen=True, tag="commit"):
    """Publish: the whole entry in one message, its segments' file descriptors alongside.

    Without a ``ticket`` (0) this is a publish by hand. The connection holds a lease on the entry afterwards.
    """

    ticket: int
    key: Hex
    device: Name
    slot: Name
    family: Hex
    fields: bytes
    manifest: bytes
    memory: Literal["memfd", "cuda"]
    segments: tuple[Nbytes, ...]
    label: Name = ""


class Refuse(_Message, frozen=True, tag="refuse"):
    """This fingerprint cannot be cached: remember it, and wake everybody who waits for it. Answered by :class:`Aborted`."""

    ticket: int
    key: Hex
    kind: Name
    reason: Text


class Abort(_Message, frozen=True, tag="abort"):
    """I give this production up: hand it to the next who waits. Answered by :class:`Aborted`."""

    ticket: int
    reason: Text


class ListEntries(_Message, frozen=True, tag="list"):
    """What is cached?"""


class Evict(_Message, frozen=True, tag="evict"):
    """Free entries by key, by slot, or all of them. Leased ones are freed when their last lease ends.

    Exactly one of ``key``, ``slot`` and ``everything`` is given; ``refusals`` forgets remembered refusals too.
    """

    key: Hex | None = None
    slot: Name | None = None
    everything: bool = False
    refusals: bool = False


class MakeRoom(_Message, frozen=True, tag="make_room"):
    """Evict unleased entries on ``device``, oldest use first, until at least ``nbytes`` are freed or none is left."""

    device: Name
    nbytes: Nbytes


class Status(_Message, frozen=True, tag="status"):
    """How is the daemon?"""


class Stop(_Message, frozen=True, tag="stop"):
    """Exit. Clients keep what they mapped; cached entries are gone."""


# ---- replies -----------------------------------------------------------------------------------------------------------------


class Hit(_Message, frozen=True, tag="hit"):
    """The entry, with the file descriptors of its segments alongside; the connection holds a lease on it from now on."""

    key: Hex
    manifest: bytes
    memory: Literal["memfd", "cuda"]
    segments: tuple[Nbytes, ...]
    waited: bool


class OtherEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the same slot under another fingerprint."""

    key: Hex
    fields: bytes


class Produce(_Message, frozen=True, tag="produce"):
    """You are the producer. ``others`` are the entries of the slot that did not match.

    ``hash_first`` tells a client with a provisional key that an entry of the same family exists: hash the files before loading
    them, the entry may be the very one.
    """

    ticket: int
    others: tuple[OtherEntry, ...]
    hash_first: bool = False


class Miss(_Message, frozen=True, tag="miss"):
    """No such entry, nobody produces it, and the client said that it will not. Other fields as in :class:`Produce`."""

    others: tuple[OtherEntry, ...]
    hash_first: bool = False


class Waiting(_Message, frozen=True, tag="waiting"):
    """Another process is producing the entry; a final reply follows."""

    phase: Name
    done: Nbytes
    total: Nbytes
    elapsed_s: Age


class Refused(_Message, frozen=True, tag="refused"):
    """A producer found out that this fingerprint cannot be cached."""

    kind: Name
    reason: Text


class Committed(_Message, frozen=True, tag="committed"):
    """Published. (When the entry existed already the reply is :class:`Hit` with ``waited=False``: use that one)."""

    key: Hex


class Aborted(_Message, frozen=True, tag="aborted"):
    """The ticket is void."""


class EntryInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of ``torchwcache status``. Times are seconds before now."""

    key: Hex
    device: Name
    slot: Name
    label: Name
    memory: Name
    nbytes: Nbytes
    segments: int
    leases: int
    age_s: Age
    idle_s: Age
    hits: int
    superseded: bool


class Entries(_Message, frozen=True, tag="entries"):
    """All entries, oldest first."""

    entries: tuple[EntryInfo, ...]


class Evicted(_Message, frozen=True, tag="evicted"):
    """What was freed now, what will be freed when its last lease ends, and how many bytes were freed now."""

    freed: tuple[Hex, ...]
    pending: tuple[Hex, ...]
    nbytes: Nbytes


class DaemonStatus(_Message, frozen=True, tag="daemon_status"):
    """The daemon itself. ``warnings`` are for an operator, such as sharing a container's lifetime with an engine."""

    version: Name
    protocol: int
    pid: int
    uptime_s: Age
    socket: Name
    entries: int
    leases: int
    producing: int
    waiting: int
    refusals: int
    nbytes: Nbytes
    fds: int
    fd_limit: int
    warnings: tuple[Text, ...] = ()


class Stopping(_Message, frozen=True, tag="stopping"):
    """Goodbye."""


class Failure(_Message, frozen=True, tag="failure"):
    """The request was not carried out. This message never changes its shape, whatever the protocol version.

    Codes: ``protocol_version``, ``malformed``, ``too_large``, ``bad_state``, ``bad_ticket``, ``bad_segments``, ``timeout``,
    ``fd_limit``, ``not_found``, ``forbidden``, ``stopping``, ``internal``.
    """

    code: Name
    message: Text
    protocol: int = PROTOCOL_VERSION


Request: TypeAlias = Union[Attach, Progress, Commit, Refuse, Abort, ListEntries, Evict, MakeRoom, Status, Stop]
Reply: TypeAlias = Union[
    Hit, Produce, Miss, Waiting, Refused, Committed, Aborted, Entries, Evicted, DaemonStatus, Stopping, Failure
]
