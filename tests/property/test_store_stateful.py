"""The store under arbitrary sequences of events, watched by a model that knows only what goes in and out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from torchwcache.daemon.entries import EntryTable
from torchwcache.daemon.events import CloseFds, Disconnected, Exit, Received, Send, SendStatus, Shutdown, Tick
from torchwcache.daemon.limits import StoreLimits
from torchwcache.daemon.store import Store
from torchwcache.wire.messages import (
    Abort,
    Attach,
    Commit,
    Committed,
    Evict,
    Failure,
    Hit,
    ListEntries,
    MakeRoom,
    Produce,
    Progress,
    Refuse,
    Status,
    Waiting,
)

KEYS = ["1" * 32, "2" * 32, "3" * 32]
PROVISIONAL = ["a" * 32, "b" * 32]
FAMILIES = ["e" * 32, "f" * 32]
DEVICES = ["cpu", "GPU-1"]
SLOTS = ["/one", "/two"]

keys, devices, slots, families = (st.sampled_from(values) for values in (KEYS, DEVICES, SLOTS, FAMILIES))


class StoreMachine(RuleBasedStateMachine):
    make_store = Store

    clients = Bundle("clients")

    def __init__(self):
        super().__init__()
        self.store = self.make_store(StoreLimits(silence_s=10, production_s=50, refusals=2))
        self.now = 0.0
        self.numbers = itertools.count(1)
        self.tokens = itertools.count(1000)
        self.connected: set[int] = set()
        self.asked: dict[int, object] = {}
        self.tickets: dict[int, int] = {}
        self.leases: dict[int, tuple[int, ...]] = {}
        self.offered: dict[tuple[int, ...], str] = {}
        self.open: set[int] = set()
        self.exited = False

    # ---- what comes out ------------------------------------------------------------------------------------------------------

    def feed(self, event):
        for effect in self.store.handle(event, now_s=self.now):
            match effect:
                case Send(client, reply, fds):
                    self.hear(client, reply, fds)
                case SendStatus(client):
                    self.hear(client, effect, ())
                case CloseFds(fds):
                    assert set(fds) <= self.open, "closed twice, or never given"
                    assert self.exited or not any(set(fds) & set(lease) for lease in self.leases.values()), (
                        "a leased entry is freed"
                    )
                    self.open -= set(fds)
                case Exit():
                    self.exited = True

    def hear(self, client, reply, fds):
        assert client in self.connected, "a reply to somebody who is gone"
        assert client in self.asked, "a reply to no request"
        request = self.asked[client]
        if isinstance(reply, Waiting):
            assert isinstance(request, Attach)
            return
        del self.asked[client]
        if isinstance(reply, Hit):
            assert fds in self.offered, "an entry that was not committed"
            assert self.offered[fds] == reply.key, "another entry's descriptors"
            assert set(fds) <= self.open, "closed descriptors are handed out"
            assert reply.key == request.key or request.provisional, "the wrong entry"
            self.leases[client] = fds
        elif isinstance(reply, Committed):
            self.leases[client] = next(fds for fds in self.offered if self.committing in fds)
        elif isinstance(reply, Produce):
            assert request.produce, "a client that cannot produce is told to"
            others = {number: ticket for number, ticket in self.tickets.items() if number != client}
            assert reply.ticket not in others.values(), "one ticket for two"
            self.tickets[client] = reply.ticket
        elif not isinstance(reply, Failure):
            assert not fds

    def ask(self, client, request, fds=()):
        if client in self.asked:
            return  # a client waits for its reply; that others are told bad_state has a test of its own
        self.asked[client] = request
        self.feed(Received(client, request, fds))
        assert isinstance(request, Attach) or client not in self.asked, "no answer"

    # ---- what goes in --------------------------------------------------------------------------------------------------------

    @rule(target=clients)
    def connect(self):
        number = next(self.numbers)
        self.connected.add(number)
        return number

    @rule(client=consumes(clients))
    def disconnect(self, client):
        self.connected.discard(client)
        self.asked.pop(client, None)
        self.leases.pop(client, None)
        self.tickets.pop(client, None)
        self.feed(Disconnected(client))

    @rule(
        client=clients,
        key=keys,
        device=devices,
        slot=slots,
        family=families,
        produce=st.booleans(),
        wait_s=st.sampled_from([0.0, 3.0, 40.0]),
    )
    def attach(self, client, key, device, slot, family, produce, wait_s):
        self.ask(client, Attach(key=key, device=device, slot=slot, family=family, fields=b"", produce=produce, wait_s=wait_s))

    @rule(
        client=clients,
        key=st.sampled_from(PROVISIONAL),
        device=devices,
        slot=slots,
        family=families,
        wait_s=st.sampled_from([3.0, 40.0]),
    )
    def attach_provisionally(self, client, key, device, slot, family, wait_s):
        self.ask(client, Attach(key=key, device=device, slot=slot, family=family, fields=b"", provisional=True, wait_s=wait_s))

    @rule(client=clients, number=st.integers(1, 3), key=keys, device=devices, slot=slots, family=families, by_hand=st.booleans())
    def commit(self, client, number, key, device, slot, family, by_hand):
        if client in self.asked:
            return
        fds = tuple(itertools.islice(self.tokens, number))
        self.open |= set(fds)
        self.offered[fds] = key
        self.committing = fds[0]
        ticket = 0 if by_hand else self.tickets.get(client, 77)
        commit = Commit(
            ticket=ticket,
            key=key,
            device=device,
            slot=slot,
            family=family,
            fields=b"",
            manifest=b"",
            memory="memfd",
            segments=(1,) * number,
        )
        self.asked[client] = _Asked(key)
        self.feed(Received(client, commit, fds))
        assert client not in self.asked, "no answer"

    @rule(client=clients, key=keys)
    def refuse(self, client, key):
        self.ask(client, Refuse(ticket=self.tickets.get(client, 77), key=key, kind="x", reason="y"))

    @rule(client=clients)
    def abort(self, client):
        self.ask(client, Abort(ticket=self.tickets.get(client, 77), reason="x"))

    @rule(client=clients, phase=st.sampled_from(["load", "pack"]))
    def progress(self, client, phase):
        self.feed(Received(client, Progress(ticket=self.tickets.get(client, 77), phase=phase)))

    @rule(
        client=clients,
        evict=st.one_of(
            keys.map(lambda key: Evict(key=key, refusals=True)),
            slots.map(lambda slot: Evict(slot=slot)),
            st.just(Evict(everything=True)),
        ),
    )
    def evict(self, client, evict):
        self.ask(client, evict)

    @rule(client=clients, device=devices, nbytes=st.integers(0, 5))
    def make_room(self, client, device, nbytes):
        self.ask(client, MakeRoom(device=device, nbytes=nbytes))

    @rule(client=clients, request=st.sampled_from([Status(), ListEntries()]))
    def look(self, client, request):
        self.ask(client, request)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 11.0, 60.0]))
    def wait(self, seconds):
        self.now += seconds
        self.feed(Tick())

    # ---- what holds always ---------------------------------------------------------------------------------------------------

    @invariant()
    def no_descriptor_is_leaked(self):
        held = [fd for entry in self.store._entries for fd in entry.fds]
        assert len(held) == len(set(held))
        assert set(held) == self.open

    @invariant()
    def leases_are_counted(self):
        for entry in self.store._entries:
            assert entry.leases == sum(lease == entry.fds for lease in self.leases.values())
            assert entry.leases or not (entry.evicted or entry.superseded), "it should have been freed"

    @invariant()
    def a_key_has_one_producer_who_is_there(self):
        productions = list(self.store._productions)
        assert len({production.owner for production in productions}) == len(productions)
        for production in productions:
            assert production.owner in self.connected
            assert self.tickets[production.owner] == production.ticket
            assert production.owner not in self.asked

    @invariant()
    def who_asked_waits_for_somebody(self):
        waiting = {client: production for production in self.store._productions for client in production.waiters}
        assert set(self.asked) == set(waiting)
        for client, production in waiting.items():
            attach = self.asked[client]
            assert production.waiters[client].deadline_s > self.now - 0.001
            assert attach.key in production.keys
            assert attach.provisional or self.store._entries.get(attach.key, attach.device) is None, "it waits for what is there"

    @invariant()
    def the_next_tick_is_due_when_somebody_waits(self):
        due = self.store.next_deadline()
        assert (due is not None) == bool(self.asked)

    @invariant()
    def the_numbers_agree(self):
        counts = self.store.counts()
        assert counts.leases == len(self.leases)
        assert counts.waiting == len(self.asked)
        assert counts.refusals <= 2

    def teardown(self):
        if self.exited:
            return
        for _ in range(100):  # every wait has a bound of 40 s here
            self.now += 0.5
            self.feed(Tick())
        assert not self.asked, "a waiter gets no answer"
        self.feed(Shutdown())
        assert self.exited
        assert not self.open, "descriptors are left"


class _Asked:
    """What a commit accepts as an answer: the entry that was there already."""

    provisional = False

    def __init__(self, key):
        self.key = key


StoreMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=40)
TestStore = StoreMachine.TestCase


# ---- the machine notices what it is there to notice --------------------------------------------------------------------------


class FreesTooEarly(Store):
    def _disconnected(self, client, now_s):
        state = self._clients.get(client)
        if state and state.lease and state.lease.leases > 1:
            self._close(state.lease.fds)
        super()._disconnected(client, now_s)


class LeaksRejectedCommits(Store):
    def _close(self, fds):
        if self._effects:
            super()._close(fds)


class ForgetsWaiters(Store):
    def _hand_on(self, production, now_s, *, owner_gone):
        if owner_gone:
            self._retire(production)


class LetsAnybodyProduce(Store):
    def _wait(self, client, attach, production, deadline_s, now_s):
        self._produce(client, attach, production.ticket)


class NeverTimesOut(Store):
    def _timed_out(self, waiter, production, now_s):
        pass


class HandsOutEvicted(Store):
    def __init__(self, limits):
        super().__init__(limits)
        self._entries = _KeepsEvicted()


class _KeepsEvicted(EntryTable):
    def release(self, entry, now_s):
        entry.evicted = entry.superseded = False
        return super().release(entry, now_s)


ONE = {"key": KEYS[0], "device": "cpu", "slot": "/one", "family": FAMILIES[0]}
ASK = {**ONE, "produce": True, "wait_s": 3.0}
PUBLISH = {**ONE, "number": 1, "by_hand": True}

SCRIPTS = {
    FreesTooEarly: [("commit", 1, PUBLISH), ("attach", 2, ASK), ("disconnect", 1, {})],
    LeaksRejectedCommits: [("commit", 1, PUBLISH), ("commit", 2, PUBLISH)],
    ForgetsWaiters: [("attach", 1, ASK), ("attach", 2, ASK), ("disconnect", 1, {})],
    LetsAnybodyProduce: [("attach", 1, ASK), ("attach", 2, ASK)],
    NeverTimesOut: [("attach", 1, ASK), ("attach", 2, ASK), ("wait", None, {"seconds": 4.0})],
    HandsOutEvicted: [("commit", 1, PUBLISH), ("evict", 2, {"evict": Evict(everything=True)}), ("disconnect", 1, {})],
}


def play(store, script):
    """Take the machine through a sequence of rules, checking its invariants after each."""

    class Machine(StoreMachine):
        make_store = store

    machine = Machine()
    for _ in range(3):
        machine.connect()
    for name, client, arguments in script:
        getattr(machine, name)(**({} if client is None else {"client": client}), **arguments)
        machine.no_descriptor_is_leaked()
        machine.leases_are_counted()
        machine.a_key_has_one_producer_who_is_there()
        machine.who_asked_waits_for_somebody()
    machine.teardown()


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=[broken.__name__ for broken in SCRIPTS])
def test_the_scripts_are_harmless(script):
    play(Store, script)


@pytest.mark.parametrize("broken", SCRIPTS)
def test_the_machine_can_fail(broken):
    with pytest.raises((AssertionError, KeyError)):
        play(broken, SCRIPTS[broken])
