"""The daemon's logic as a pure state machine: events in, effects out. No I/O, no clock, no threads.

Descriptors are opaque tokens here. The shell (``server.py``) gives every event with the time it happened at, carries out the
effects in order, and calls :meth:`Store.handle` with :class:`Tick` no later than :meth:`Store.next_deadline`.

Who owns a token: those that come with an event belong to the store, which gives every one of them back in exactly one
:class:`CloseFds`. Those in a :class:`Send` are lent: the receiver's lease keeps them open until its connection ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torchwcache.daemon.entries import Entry, EntryTable
from torchwcache.daemon.events import CloseFds, Disconnected, Effect, Event, Exit, Received, Send, SendStatus, Shutdown, Tick
from torchwcache.daemon.limits import StoreLimits
from torchwcache.daemon.production import Production, ProductionTable, Waiter
from torchwcache.daemon.refusals import Refusals
from torchwcache.wire.messages import (
    WAITING_INTERVAL_S,
    Abort,
    Aborted,
    Attach,
    Commit,
    Committed,
    Entries,
    Evict,
    Evicted,
    Failure,
    Hit,
    ListEntries,
    MakeRoom,
    Miss,
    Produce,
    Progress,
    Refuse,
    Refused,
    Reply,
    Status,
    Stop,
    Stopping,
)

__all__ = ["Counts", "Store"]


@dataclass(frozen=True, slots=True)
class Counts:
    """The store in numbers."""

    entries: int
    leases: int
    producing: int
    waiting: int
    refusals: int
    nbytes: int


@dataclass(slots=True)
class _Client:
    """What a connection is doing: at most one of these, except that a holder of a lease may ask and administer."""

    lease: Entry | None = None
    production: Production | None = None
    waiting: Production | None = None


class Store:
    """Entries, leases, single-flight production and waiting clients.

    Args:
        limits: Bounds.
    """

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self._limits = limits or StoreLimits()
        self._entries = EntryTable()
        self._productions = ProductionTable()
        self._refusals = Refusals(self._limits.refusals)
        self._clients: dict[int, _Client] = {}
        self._last_ticket = 0
        self._stopped = False
        self._effects: list[Effect] = []

    # ---- the interface of the shell ------------------------------------------------------------------------------------------

    def handle(self, event: Event, *, now_s: float) -> list[Effect]:
        """Take one event at a time on some monotonic clock; returns what is to be done, in order."""
        effects: list[Effect] = []
        self._effects = effects
        match event:
            case Received():
                self._received(event, now_s)
            case Disconnected():
                self._disconnected(event.client, now_s)
            case Tick():
                self._tick(now_s)
            case Shutdown():
                self._stop()
        return effects

    def next_deadline(self) -> float | None:
        """When the next :class:`Tick` is due, or ``None`` when nothing depends on time."""
        due: list[float] = []
        for production in self._productions:
            if production.waiters:
                due += [self._overdue_at(production), production.told_s + WAITING_INTERVAL_S]
                due += [waiter.deadline_s for waiter in production.waiters.values()]
        return min(due, default=None)

    def is_engaged(self, client: int) -> bool:
        """Whether a connection has a reason to be open and silent: a lease, a production, or a wait."""
        state = self._clients.get(client)
        return state is not None and bool(state.lease or state.production or state.waiting)

    def counts(self) -> Counts:
        """The store in numbers."""
        entries, productions = list(self._entries), list(self._productions)
        return Counts(
            entries=len(entries),
            leases=sum(entry.leases for entry in entries),
            producing=len(productions),
            waiting=sum(len(production.waiters) for production in productions),
            refusals=len(self._refusals),
            nbytes=sum(entry.nbytes for entry in entries),
        )

    # ---- events --------------------------------------------------------------------------------------------------------------

    def _received(self, event: Received, now_s: float) -> None:
        client, request = event.client, event.request
        state = self._clients.setdefault(client, _Client())
        if self._stopped or (state.waiting and not isinstance(request, Progress)):
            self._close(event.fds)
            if self._stopped:
                self._fail(client, "stopping", "the daemon is stopping")
            else:
                self._fail(client, "bad_state", "a request before the last one was answered: this connection waits for an entry")
            return
        match request:
            case Attach():
                self._attach(client, request, now_s)
            case Progress():
                self._progress(client, request, now_s)
            case Commit():
                self._commit(client, request, event.fds, now_s)
            case Refuse():
                self._refuse(client, request, now_s)
            case Abort():
                if state.production and state.production.ticket == request.ticket:
                    self._hand_on(state.production, now_s, owner_gone=True)
                self._send(client, Aborted())
            case ListEntries():
                self._send(client, Entries(entries=tuple(entry.info(now_s) for entry in self._entries)))
            case Evict():
                self._evict(client, request)
            case MakeRoom():
                freed, _ = self._entries.evict(self._entries.oldest_unleased(request.device, request.nbytes))
                self._send(client, _evicted(freed, []))
                self._close_entries(freed)
            case Status():
                self._effects.append(SendStatus(client))
            case Stop():
                self._send(client, Stopping())
                self._stop()

    def _disconnected(self, client: int, now_s: float) -> None:
        state = self._clients.pop(client, None)
        if state is None:
            return
        if state.lease:
            self._close_entries(self._entries.release(state.lease, now_s))
        if state.waiting:
            del state.waiting.waiters[client]
        if state.production:
            self._hand_on(state.production, now_s, owner_gone=True)

    def _tick(self, now_s: float) -> None:
        for production in list(self._productions):
            for waiter in list(production.waiters.values()):
                if waiter.deadline_s <= now_s:
                    self._leave(production, waiter)
                    self._timed_out(waiter, production, now_s)
            if production.waiters and self._overdue_at(production) <= now_s:
                self._hand_on(production, now_s, owner_gone=False)
            if production.waiters and production.told_s + WAITING_INTERVAL_S <= now_s:
                self._tell(production, now_s)

    def _stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        for production in self._productions:
            for client in production.waiters:
                self._fail(client, "stopping", "the daemon was stopped while this client waited for an entry")
        # Connections are not looked at any more, but a Disconnected may follow: nothing must be left for it to release.
        self._clients.clear()
        self._productions = ProductionTable()
        self._effects.append(Exit())  # first: descriptors may be on their way to a client still
        self._close_entries(self._entries.clear())

    # ---- attach --------------------------------------------------------------------------------------------------------------

    def _attach(self, client: int, attach: Attach, now_s: float) -> None:
        state = self._clients[client]
        production = state.production
        if state.lease or (production and not _continues(production, attach)):
            self._fail(client, "bad_state", "this connection has a lease or a production already: open another one")
            return
        if production is None:
            self._place(client, attach, _deadline(attach, now_s), now_s, waited=False)
        else:
            self._continue(production, attach, now_s)

    def _place(self, client: int, attach: Attach, deadline_s: float, now_s: float, *, waited: bool) -> None:
        """Answer a client that has neither lease nor production, or let it wait."""
        if refused := self._refusals.get(attach.key):
            self._send(client, refused)
            return
        if entry := self._entries.get(attach.key, attach.device):
            self._hit(client, entry, now_s, waited=waited)
            return
        production = self._productions.get(attach.key, attach.device)
        if production is None:
            if attach.produce:
                self._start(client, attach, now_s)
            else:
                self._miss(client, attach)
        elif self._overdue_at(production) > now_s:
            self._wait(client, attach, production, deadline_s, now_s)
        elif attach.produce:
            self._take_over(production, client, attach, now_s)
        else:
            self._miss(client, attach)

    def _continue(self, production: Production, attach: Attach, now_s: float) -> None:
        """A producer has hashed the checkpoint: its production, and all who wait for it, go on under the full key."""
        client, key = production.owner, attach.key
        entry = self._entries.get(key, attach.device)
        refused = self._refusals.get(key)
        running = self._productions.get(key, attach.device)
        if refused:
            self._finish(production, key, lambda waiter: self._send(waiter, refused), now_s)
            self._send(client, refused)
        elif entry:
            self._finish(production, key, lambda waiter: self._hit(waiter, entry, now_s, waited=True), now_s)
            self._hit(client, entry, now_s, waited=False)
        elif running not in (None, production):
            self._merge(production, running, attach, now_s)
        elif attach.produce:
            production.attach = attach
            production.heard_s = now_s
            self._productions.also(production, {key})
            self._produce(client, attach, production.ticket)
        else:
            self._hand_on(production, now_s, owner_gone=True)
            self._miss(client, attach)

    def _merge(self, production: Production, running: Production, attach: Attach, now_s: float) -> None:
        """Somebody else is producing what this production turned out to be: everybody goes there."""
        waiters = self._retire(production)
        self._productions.also(running, {production.attach.key})
        self._place(production.owner, attach, _deadline(attach, now_s), now_s, waited=False)
        for waiter in waiters:
            self._place(waiter.client, waiter.attach, waiter.deadline_s, now_s, waited=True)

    def _start(self, client: int, attach: Attach, now_s: float) -> None:
        production = Production(
            ticket=self._next_ticket(),
            owner=client,
            attach=attach,
            keys={attach.key},
            started_s=now_s,
            heard_s=now_s,
            told_s=now_s,
        )
        self._productions.add(production)
        self._clients[client].production = production
        self._produce(client, attach, production.ticket)

    def _produce(self, client: int, attach: Attach, ticket: int) -> None:
        others = self._entries.others(attach.slot, attach.device, attach.key)
        self._send(client, Produce(ticket=ticket, others=others, hash_first=self._hash_first(attach)))

    def _miss(self, client: int, attach: Attach) -> None:
        others = self._entries.others(attach.slot, attach.device, attach.key)
        self._send(client, Miss(others=others, hash_first=self._hash_first(attach)))

    def _hash_first(self, attach: Attach) -> bool:
        family, device = attach.family, attach.device
        return attach.provisional and (self._entries.has_family(family, device) or self._productions.has_family(family, device))

    def _hit(self, client: int, entry: Entry, now_s: float, *, waited: bool) -> None:
        self._lease(client, entry, now_s)
        entry.hits += 1
        reply = Hit(key=entry.key, manifest=entry.manifest, memory=entry.memory, segments=entry.segments, waited=waited)
        self._send(client, reply, entry.fds)

    def _lease(self, client: int, entry: Entry, now_s: float) -> None:
        state = self._clients[client]
        assert state.lease is None
        state.lease = entry
        self._entries.lease(entry, now_s)

    # ---- waiting -------------------------------------------------------------------------------------------------------------

    def _wait(self, client: int, attach: Attach, production: Production, deadline_s: float, now_s: float) -> None:
        waiter = Waiter(client=client, attach=attach, deadline_s=deadline_s)
        if deadline_s <= now_s:
            self._timed_out(waiter, production, now_s)
            return
        production.waiters[client] = waiter
        self._clients[client].waiting = production
        self._send(client, production.report(now_s))

    def _leave(self, production: Production, waiter: Waiter) -> None:
        del production.waiters[waiter.client]
        self._clients[waiter.client].waiting = None

    def _timed_out(self, waiter: Waiter, production: Production, now_s: float) -> None:
        self._fail(
            waiter.client,
            "timeout",
            f"entry {waiter.attach.key} of {waiter.attach.slot} is still being produced (phase {production.phase}, for"
            f" {now_s - production.started_s:.0f} s), and this client wanted to wait {waiter.attach.wait_s:g} s at most",
        )

    def _tell(self, production: Production, now_s: float) -> None:
        production.told_s = now_s
        for client in production.waiters:
            self._send(client, production.report(now_s))

    def _overdue_at(self, production: Production) -> float:
        return min(production.heard_s + self._limits.silence_s, production.started_s + self._limits.production_s)

    # ---- the end of a production ---------------------------------------------------------------------------------------------

    def _retire(self, production: Production) -> list[Waiter]:
        """Take a production off the table; its owner and its waiters are free for something else."""
        self._productions.remove(production)
        if owner := self._clients.get(production.owner):
            owner.production = None
        waiters = list(production.waiters.values())
        for waiter in waiters:
            self._leave(production, waiter)
        return waiters

    def _finish(self, production: Production, key: str, answer: Callable[[int], None], now_s: float) -> None:
        """End a production that turned out to be ``key``; waiters who wanted something else start over."""
        for waiter in self._retire(production):
            if production.suits(waiter, key):
                answer(waiter.client)
            else:
                self._place(waiter.client, waiter.attach, waiter.deadline_s, now_s, waited=True)

    def _hand_on(self, production: Production, now_s: float, *, owner_gone: bool) -> None:
        """The producer gave up, died or fell silent: the first waiter that can produce takes over."""
        heir = next((waiter for waiter in production.waiters.values() if waiter.attach.produce), None)
        if heir:
            self._leave(production, heir)
            self._take_over(production, heir.client, heir.attach, now_s)
            return
        # A silent producer whom nobody can replace may still come back; nobody waits for it, though.
        waiters = self._retire(production) if owner_gone else list(production.waiters.values())
        for waiter in waiters:
            if not owner_gone:
                self._leave(production, waiter)
            self._miss(waiter.client, waiter.attach)

    def _take_over(self, production: Production, client: int, attach: Attach, now_s: float) -> None:
        if former := self._clients.get(production.owner):
            former.production = None
        production.restart(ticket=self._next_ticket(), owner=client, attach=attach, now_s=now_s)
        self._clients[client].production = production
        self._produce(client, attach, production.ticket)

    # ---- what producers say --------------------------------------------------------------------------------------------------

    def _progress(self, client: int, progress: Progress, now_s: float) -> None:
        production = self._clients[client].production
        if production is None or production.ticket != progress.ticket:
            return  # not answered, by contract; a void ticket is noticed at the commit
        production.heard_s = now_s
        news = production.phase != progress.phase or now_s - production.told_s >= WAITING_INTERVAL_S
        production.phase, production.done, production.total = progress.phase, progress.done, progress.total
        if news:
            self._tell(production, now_s)

    def _commit(self, client: int, commit: Commit, fds: tuple[int, ...], now_s: float) -> None:
        state = self._clients[client]
        production = state.production
        ours = production is not None and production.ticket == commit.ticket
        entry = self._entries.get(commit.key, commit.device)
        if state.lease or (production and not ours) or (production and production.device != commit.device):
            self._close(fds)
            self._fail(client, "bad_state", "this connection has a lease already, or its production is another one")
            return
        if entry is None and commit.ticket and not ours:
            self._close(fds)
            self._fail(
                client,
                "bad_ticket",
                f"production {commit.ticket} is not this connection's any more: its producer said nothing for"
                f" {self._limits.silence_s:g} s or took longer than {self._limits.production_s:g} s, and another has taken over",
            )
            return
        published: Entry
        if entry is None:
            published = self._publish(client, commit, fds, now_s)
        else:
            self._close(fds)
            published = entry
        if production:
            self._finish(production, commit.key, lambda waiter: self._hit(waiter, published, now_s, waited=True), now_s)
        if entry:
            self._hit(client, entry, now_s, waited=False)
        self._wake(published, now_s)

    def _publish(self, client: int, commit: Commit, fds: tuple[int, ...], now_s: float) -> Entry:
        entry = Entry(
            key=commit.key,
            device=commit.device,
            slot=commit.slot,
            family=commit.family,
            fields=commit.fields,
            manifest=commit.manifest,
            memory=commit.memory,
            segments=commit.segments,
            label=commit.label,
            fds=fds,
            created_s=now_s,
            used_s=now_s,
        )
        freed = self._entries.add(entry)
        self._lease(client, entry, now_s)
        self._refusals.forget(lambda key, slot: key == commit.key)  # somebody found a way after all
        self._send(client, Committed(key=entry.key))
        self._close_entries(freed)
        return entry

    def _wake(self, entry: Entry, now_s: float) -> None:
        """Serve those who wait for another producer of the same entry; it goes on, and finds the entry when it commits."""
        production = self._productions.get(entry.key, entry.device)
        for waiter in list(production.waiters.values()) if production else []:
            assert production
            if production.suits(waiter, entry.key):
                self._leave(production, waiter)
                self._hit(waiter.client, entry, now_s, waited=True)

    def _refuse(self, client: int, refuse: Refuse, now_s: float) -> None:
        production = self._clients[client].production
        if production is None or production.ticket != refuse.ticket:
            self._fail(client, "bad_ticket", f"production {refuse.ticket} is not this connection's")
            return
        refused = Refused(kind=refuse.kind, reason=refuse.reason)
        attach = production.attach
        self._refusals.remember((refuse.key, attach.key), slot=attach.slot, refused=refused)
        self._send(client, Aborted())
        self._finish(production, refuse.key, lambda waiter: self._send(waiter, refused), now_s)

    # ---- administration ------------------------------------------------------------------------------------------------------

    def _evict(self, client: int, evict: Evict) -> None:
        named = [evict.key is not None, evict.slot is not None, evict.everything]
        if sum(named) != 1:
            self._fail(client, "malformed", "evict needs exactly one of key, slot and everything")
            return

        def chosen(key: str, slot: str) -> bool:
            return evict.everything or key == evict.key or slot == evict.slot

        forgotten = self._refusals.forget(chosen) if evict.refusals else 0
        entries = [entry for entry in self._entries if chosen(entry.key, entry.slot)]
        if not entries and not forgotten and not evict.everything:
            self._fail(client, "not_found", f"no entry {evict.key or evict.slot}: `torchwcache status` lists what is cached")
            return
        freed, pending = self._entries.evict(entries)
        self._send(client, _evicted(freed, pending))
        self._close_entries(freed)

    # ---- effects -------------------------------------------------------------------------------------------------------------

    def _send(self, client: int, reply: Reply, fds: tuple[int, ...] = ()) -> None:
        self._effects.append(Send(client, reply, fds))

    def _fail(self, client: int, code: str, message: str) -> None:
        self._send(client, Failure(code=code, message=message))

    def _close(self, fds: tuple[int, ...]) -> None:
        if fds:
            self._effects.append(CloseFds(fds))

    def _close_entries(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._close(entry.fds)

    def _next_ticket(self) -> int:
        self._last_ticket += 1
        return self._last_ticket


def _deadline(attach: Attach, now_s: float) -> float:
    return now_s + attach.wait_s


def _continues(production: Production, attach: Attach) -> bool:
    before = production.attach
    return before.provisional and not attach.provisional and (before.device, before.family) == (attach.device, attach.family)


def _evicted(freed: Iterable[Entry], pending: Iterable[Entry]) -> Evicted:
    done = list(freed)
    return Evicted(
        freed=tuple(entry.key for entry in done),
        pending=tuple(entry.key for entry in pending),
        nbytes=sum(entry.nbytes for entry in done),
    )
