from __future__ import annotations

import itertools

import pytest

from torchwcache.daemon.events import CloseFds, Disconnected, Exit, Received, Send, SendStatus, Shutdown, Tick
from torchwcache.daemon.limits import StoreLimits
from torchwcache.daemon.store import Counts, Store
from torchwcache.wire.messages import (
    Abort,
    Aborted,
    Attach,
    Commit,
    Committed,
    Entries,
    Evict,
    Evicted,
    Hit,
    ListEntries,
    MakeRoom,
    Miss,
    Produce,
    Progress,
    Refuse,
    Refused,
    Status,
    Stop,
    Stopping,
    Waiting,
)

K1, K2, K3, P1, P2 = ("1" * 32, "2" * 32, "3" * 32, "a" * 32, "b" * 32)
FAMILY, OTHER_FAMILY = "f" * 32, "e" * 32


class Driver:
    """A store with a clock, clients by name, and everything it said."""

    def __init__(self, **limits):
        self.store = Store(StoreLimits(**limits))
        self.now = 1000.0
        self.said: dict[str, list] = {}
        self.lent: dict[str, tuple] = {}
        self.closed: list[int] = []
        self.exited = False
        self._numbers: dict[str, int] = {}
        self._connections = itertools.count(1)
        self._tokens = itertools.count(100)

    def event(self, event):
        names = {number: name for name, number in self._numbers.items()}
        for effect in self.store.handle(event, now_s=self.now):
            match effect:
                case Send(client, reply, fds):
                    self.said.setdefault(names[client], []).append(reply)
                    if fds:
                        assert not set(fds) & set(self.closed), "a closed descriptor is handed out"
                        self.lent[names[client]] = fds
                case CloseFds(fds):
                    assert not set(fds) & set(self.closed), "closed twice"
                    self.closed += fds
                case Exit():
                    self.exited = True
                case SendStatus(client):
                    self.said.setdefault(names[client], []).append("status")

    def request(self, name, request, fds=()):
        """Send a request; returns the replies that it brought for its sender."""
        if name not in self._numbers:
            self._numbers[name] = next(self._connections)
        number = self._numbers[name]
        before = len(self.said.get(name, []))
        self.event(Received(number, request, tuple(fds)))
        return self.said.get(name, [])[before:]

    def attach(self, name, key=K1, **more):
        more = {"device": "cpu", "slot": "/model", "family": FAMILY, "fields": b"fields", **more}
        (*waiting, reply) = self.request(name, Attach(key=key, **more))
        assert all(isinstance(one, Waiting) for one in waiting)
        return reply

    def commit(self, name, ticket, key=K1, *, segments=(10, 20), **more):
        fds = tuple(next(self._tokens) for _ in segments)
        more = {
            "device": "cpu",
            "slot": "/model",
            "family": FAMILY,
            "fields": b"fields",
            "manifest": b"m",
            "memory": "memfd",
            **more,
        }
        self.request(name, Commit(ticket=ticket, key=key, segments=segments, **more), fds)
        return fds

    def publish(self, name, key=K1, **more):
        fds = self.commit(name, 0, key, **more)
        assert self.last(name) == Committed(key=key)
        return fds

    def last(self, name):
        return self.said[name][-1]

    def leave(self, name):
        self.event(Disconnected(self._numbers.pop(name)))

    def later(self, seconds):
        self.now += seconds
        self.event(Tick())

    def keys(self):
        return [entry.key for entry in self.request("lister", ListEntries())[0].entries]


@pytest.fixture
def d():
    return Driver(silence_s=60, production_s=1000, refusals=3)


# ---- hit, miss, produce ------------------------------------------------------------------------------------------------------


def test_the_first_produces_and_the_next_hits(d):
    produce = d.attach("a")
    assert produce == Produce(ticket=produce.ticket, others=(), hash_first=False)
    fds = d.commit("a", produce.ticket)
    assert d.said["a"][-1] == Committed(key=K1)
    assert d.attach("b") == Hit(key=K1, manifest=b"m", memory="memfd", segments=(10, 20), waited=False)
    assert d.lent["b"] == fds
    assert d.closed == []


def test_nothing_is_visible_before_the_commit(d):
    d.attach("a")
    assert d.keys() == []
    assert isinstance(d.attach("b", K1, produce=False, wait_s=5), Waiting)
    d.leave("a")
    assert d.last("b") == Miss(others=())
    assert d.keys() == []


def test_who_cannot_produce_is_told_that_there_is_nothing(d):
    assert d.attach("a", produce=False) == Miss(others=())
    assert d.store.counts().producing == 0


def test_key_and_device_together_name_an_entry(d):
    d.publish("a", device="GPU-1")
    assert isinstance(d.attach("b", device="GPU-2"), Produce)
    assert isinstance(d.attach("c", device="GPU-1"), Hit)


def test_a_mismatch_names_the_other_entries_of_the_slot(d):
    d.publish("a", K1, fields=b"one")
    d.publish("b", K2, fields=b"two", family=OTHER_FAMILY)
    d.publish("c", K3, slot="/elsewhere")
    reply = d.attach("d", "4" * 32, produce=False)
    assert [(other.key, other.fields) for other in reply.others] == [(K1, b"one"), (K2, b"two")]
    assert [other.key for other in d.attach("e", "4" * 32).others] == [K1, K2]


def test_one_connection_holds_one_thing(d):
    d.attach("a")
    assert d.attach("a", K2).code == "bad_state"
    d.publish("b", K2)
    assert d.attach("b", K2).code == "bad_state"
    fds = d.commit("b", 0, K3)
    assert d.last("b").code == "bad_state"
    assert d.closed == [*fds]


def test_requests_while_waiting_are_out_of_turn(d):
    d.attach("a")
    d.attach("b")
    assert d.request("b", Status())[0].code == "bad_state"
    fds = d.commit("b", 0)
    assert d.last("b").code == "bad_state"
    assert d.closed == [*fds]


def test_a_holder_of_a_lease_may_ask_and_administer(d):
    d.publish("a")
    assert d.request("a", Status()) == ["status"]
    assert isinstance(d.request("a", ListEntries())[0], Entries)
    assert d.request("a", Evict(everything=True))[0].pending == (K1,)


# ---- single flight -----------------------------------------------------------------------------------------------------------


def test_all_others_wait_and_are_served_by_one_commit(d):
    ticket = d.attach("a").ticket
    for name in "bcdefgh":
        assert isinstance(d.attach(name), Waiting)
    assert d.store.counts() == Counts(entries=0, leases=0, producing=1, waiting=7, refusals=0, nbytes=0)
    fds = d.commit("a", ticket)
    for name in "bcdefgh":
        assert d.last(name) == Hit(key=K1, manifest=b"m", memory="memfd", segments=(10, 20), waited=True)
        assert d.lent[name] == fds
    assert d.store.counts() == Counts(entries=1, leases=8, producing=0, waiting=0, refusals=0, nbytes=30)


def test_waiting_clients_hear_how_it_goes(d):
    ticket = d.attach("a").ticket
    assert d.attach("b") == Waiting(phase="starting", done=0, total=0, elapsed_s=0)
    d.now += 0.1
    d.request("a", Progress(ticket=ticket, phase="load", done=1, total=9))
    assert d.last("b") == Waiting(phase="load", done=1, total=9, elapsed_s=pytest.approx(0.1))
    d.now += 0.1
    d.request("a", Progress(ticket=ticket, phase="load", done=2, total=9))
    assert d.last("b").done == 1  # not each of a hundred reports a second
    d.now += 1.0
    d.request("a", Progress(ticket=ticket, phase="load", done=3, total=9))
    assert d.last("b").done == 3


def test_waiting_clients_hear_that_the_daemon_lives(d):
    d.attach("a")
    d.attach("b")
    for _ in range(5):
        heard = len(d.said["b"])
        d.now = d.store.next_deadline()
        d.event(Tick())
        assert len(d.said["b"]) == heard + 1
    assert d.now == 1005.0


def test_a_wait_has_a_bound(d):
    d.attach("a")
    d.attach("b", wait_s=5)
    d.later(4.9)
    assert isinstance(d.last("b"), Waiting)
    d.later(0.2)
    assert d.last("b").code == "timeout"
    assert "phase starting" in d.last("b").message
    assert isinstance(d.attach("b", wait_s=5), Waiting)  # the connection may try again
    assert d.attach("c", wait_s=0).code == "timeout"


def test_nothing_is_due_when_nobody_waits(d):
    d.attach("a")
    assert d.store.next_deadline() is None


@pytest.mark.parametrize("how", ["death", "abort"])
def test_a_production_is_handed_to_the_first_who_can(d, how):
    ticket = d.attach("a").ticket
    d.attach("b", produce=False)
    d.attach("c")
    d.attach("d")
    if how == "death":
        d.leave("a")
    else:
        assert d.request("a", Abort(ticket=ticket, reason="x")) == [Aborted()]
    assert isinstance(d.last("b"), Waiting)
    assert isinstance(d.last("c"), Produce)
    assert isinstance(d.last("d"), Waiting)
    assert d.last("c").ticket != ticket
    d.commit("c", d.last("c").ticket)
    assert isinstance(d.last("b"), Hit)
    assert isinstance(d.last("d"), Hit)


def test_when_nobody_can_take_over_all_are_told(d):
    d.attach("a")
    d.attach("b", produce=False)
    d.leave("a")
    assert d.last("b") == Miss(others=())
    assert d.store.counts().producing == 0
    assert isinstance(d.attach("c"), Produce)


def test_a_waiter_that_dies_is_forgotten(d):
    ticket = d.attach("a").ticket
    d.attach("b")
    d.attach("c")
    d.leave("b")
    d.leave("a")
    assert isinstance(d.last("c"), Produce)
    d.commit("a2", ticket)
    assert d.last("a2").code == "bad_ticket"


def test_abort_is_idempotent(d):
    ticket = d.attach("a").ticket
    assert d.request("a", Abort(ticket=ticket, reason="x")) == [Aborted()]
    assert d.request("a", Abort(ticket=ticket, reason="x")) == [Aborted()]
    assert isinstance(d.attach("a"), Produce)


# ---- silent producers --------------------------------------------------------------------------------------------------------


def test_a_silent_producer_is_replaced_and_its_late_commit_refused(d):
    ticket = d.attach("a").ticket
    d.attach("b")
    d.later(59)
    assert isinstance(d.last("b"), Waiting)
    d.later(2)
    assert isinstance(d.last("b"), Produce)
    fds = d.commit("a", ticket)
    assert d.last("a").code == "bad_ticket"
    assert d.closed == [*fds]
    d.commit("b", d.last("b").ticket)
    assert d.last("b") == Committed(key=K1)
    more = d.commit("a", ticket)
    assert isinstance(d.last("a"), Hit)  # by now there is one
    assert d.closed == [*fds, *more]


def test_progress_keeps_a_producer(d):
    ticket = d.attach("a").ticket
    d.attach("b")
    for _ in range(10):
        d.later(50)
        d.request("a", Progress(ticket=ticket, phase="load"))
    assert isinstance(d.last("b"), Waiting)


def test_progress_of_a_void_ticket_counts_for_nothing(d):
    ticket = d.attach("a").ticket
    d.attach("b")
    d.later(61)
    d.attach("c")
    for _ in range(3):
        d.request("a", Progress(ticket=ticket, phase="load"))
        d.request("c", Progress(ticket=ticket, phase="load"))
        d.later(30)
    assert isinstance(d.last("c"), Produce)


def test_production_has_a_total_bound(d):
    ticket = d.attach("a").ticket
    d.attach("b", wait_s=10000)
    for _ in range(25):
        d.later(41)
        d.request("a", Progress(ticket=ticket, phase="load"))
    assert isinstance(d.last("b"), Produce)


def test_a_silent_producer_whom_nobody_waits_for_may_still_commit(d):
    ticket = d.attach("a").ticket
    d.later(5000)
    d.commit("a", ticket)
    assert d.last("a") == Committed(key=K1)


def test_who_comes_after_a_producer_fell_silent_takes_over_at_once(d):
    d.attach("a")
    d.later(61)
    assert d.attach("b", produce=False) == Miss(others=())
    assert isinstance(d.attach("c"), Produce)
    assert isinstance(d.attach("d"), Waiting)


# ---- refusals ----------------------------------------------------------------------------------------------------------------


def test_a_refusal_wakes_everybody_and_is_remembered(d):
    ticket = d.attach("a").ticket
    d.attach("b")
    d.attach("c", produce=False)
    assert d.request("a", Refuse(ticket=ticket, key=K1, kind="gptq", reason="not on the list")) == [Aborted()]
    refused = Refused(kind="gptq", reason="not on the list")
    assert d.last("b") == d.last("c") == d.attach("d") == refused
    assert d.store.counts().producing == 0
    assert d.store.counts().refusals == 1


def test_a_refusal_needs_a_ticket(d):
    d.attach("a")
    assert d.request("b", Refuse(ticket=1, key=K1, kind="x", reason="y"))[0].code == "bad_ticket"
    assert d.store.counts().refusals == 0


def test_refusals_are_bounded_and_the_least_used_goes(d):
    for key in (K1, K2, K3):
        d.request("a", Refuse(ticket=d.attach("a", key).ticket, key=key, kind="x", reason=""))
    assert isinstance(d.attach("b", K1), Refused)
    d.request("a", Refuse(ticket=d.attach("a", "4" * 32).ticket, key="4" * 32, kind="x", reason=""))
    assert d.store.counts().refusals == 3
    assert isinstance(d.attach("b", K1), Refused)
    assert isinstance(d.attach("b", K2), Produce)


def test_a_refusal_under_the_full_key_holds_for_the_provisional_one_too(d):
    ticket = d.attach("a", P1, provisional=True).ticket
    d.attach("b", P1, provisional=True)
    d.request("a", Refuse(ticket=ticket, key=K1, kind="x", reason="y"))
    assert isinstance(d.last("b"), Refused)
    assert isinstance(d.attach("c", P1, provisional=True), Refused)
    assert isinstance(d.attach("d", K1), Refused)


@pytest.mark.parametrize(
    "evict", [Evict(key=K1, refusals=True), Evict(slot="/model", refusals=True), Evict(everything=True, refusals=True)]
)
def test_refusals_can_be_forgotten(d, evict):
    d.request("a", Refuse(ticket=d.attach("a").ticket, key=K1, kind="x", reason=""))
    assert d.request("a", Evict(key=K1))[0].code == "not_found"
    assert d.request("a", evict) == [Evicted(freed=(), pending=(), nbytes=0)]
    assert isinstance(d.attach("b"), Produce)


def test_a_publish_by_hand_overrules_a_refusal(d):
    d.request("a", Refuse(ticket=d.attach("a").ticket, key=K1, kind="x", reason=""))
    d.publish("b")
    assert isinstance(d.attach("c"), Hit)


# ---- commits -----------------------------------------------------------------------------------------------------------------


def test_a_commit_of_what_is_there_already_is_a_hit(d):
    first = d.publish("a")
    second = d.commit("b", 0)
    assert d.last("b") == Hit(key=K1, manifest=b"m", memory="memfd", segments=(10, 20), waited=False)
    assert d.lent["b"] == first
    assert d.closed == [*second]


def test_a_publish_by_hand_serves_those_who_wait_for_a_producer(d):
    ticket = d.attach("a").ticket
    d.attach("b")
    d.publish("hand")
    assert isinstance(d.last("b"), Hit)
    assert d.store.counts().producing == 1
    fds = d.commit("a", ticket)
    assert isinstance(d.last("a"), Hit)
    assert d.closed == [*fds]


def test_a_ticket_is_good_for_its_own_connection_only(d):
    ticket = d.attach("a").ticket
    fds = d.commit("b", ticket)
    assert d.last("b").code == "bad_ticket"
    assert d.closed == [*fds]
    d.commit("a", ticket)
    assert d.last("a") == Committed(key=K1)


def test_a_producer_cannot_publish_on_another_device_or_by_hand(d):
    ticket = d.attach("a").ticket
    one = d.commit("a", ticket, device="GPU-1")
    assert d.last("a").code == "bad_state"
    two = d.commit("a", 0)
    assert d.last("a").code == "bad_state"
    assert d.closed == [*one, *two]
    d.commit("a", ticket)
    assert d.last("a") == Committed(key=K1)


def test_a_checkpoint_that_turned_out_to_be_another_does_not_serve_who_wanted_the_first(d):
    ticket = d.attach("a", K1).ticket
    d.attach("b", K1)
    d.attach("c", K1)
    d.commit("a", ticket, K2)
    assert d.last("a") == Committed(key=K2)
    assert isinstance(d.last("b"), Produce)
    assert isinstance(d.last("c"), Waiting)


# ---- provisional keys --------------------------------------------------------------------------------------------------------


def test_waiters_under_the_provisional_key_get_what_it_turned_out_to_be(d):
    ticket = d.attach("a", P1, provisional=True).ticket
    d.attach("b", P1, provisional=True)
    d.commit("a", ticket, K1)
    assert d.last("a") == Committed(key=K1)
    assert d.last("b").key == K1
    assert isinstance(d.attach("c", K1), Hit)
    assert isinstance(d.attach("d", P1, provisional=True), Produce)  # a stat identity is not an identity


def test_hash_first_when_the_family_is_there(d):
    assert not d.attach("a", P1, provisional=True).hash_first
    d.publish("b", K1, slot="/copy/elsewhere")
    assert d.attach("c", P2, provisional=True).hash_first
    assert d.attach("d", "c" * 32, provisional=True, produce=False).hash_first
    assert not d.attach("e", "d" * 32, provisional=True, device="GPU-1").hash_first
    assert not d.attach("f", "e" * 32, provisional=True, family=OTHER_FAMILY).hash_first
    assert not d.attach("g", K2).hash_first


def test_hash_first_when_the_family_is_being_produced_under_a_full_key(d):
    d.attach("a", K1)
    assert d.attach("b", P1, provisional=True).hash_first


def test_a_producer_that_hashed_finds_the_entry_and_so_do_its_waiters(d):
    d.publish("x", K1)
    d.attach("a", P1, provisional=True)
    d.attach("b", P1, provisional=True)
    assert d.attach("a", K1) == Hit(key=K1, manifest=b"m", memory="memfd", segments=(10, 20), waited=False)
    assert d.last("b").waited
    assert d.store.counts().producing == 0


def test_a_producer_that_hashed_goes_on_under_both_keys(d):
    ticket = d.attach("a", P1, provisional=True).ticket
    d.attach("b", P1, provisional=True)
    assert d.attach("a", K1) == Produce(ticket=ticket, others=())
    assert isinstance(d.attach("c", K1), Waiting)
    assert isinstance(d.attach("d", P1, provisional=True), Waiting)
    assert d.attach("a", K2).code == "bad_state"  # once
    d.commit("a", ticket)
    assert [type(d.last(name)) for name in "bcd"] == [Hit, Hit, Hit]


def test_a_producer_that_hashed_joins_the_one_who_is_at_it(d):
    ticket = d.attach("x", K1).ticket
    d.attach("a", P1, provisional=True)
    d.attach("b", P1, provisional=True)
    assert isinstance(d.attach("a", K1), Waiting)
    assert isinstance(d.attach("c", P1, provisional=True), Waiting)
    assert d.store.counts().producing == 1
    d.commit("x", ticket)
    assert [type(d.last(name)) for name in "abc"] == [Hit, Hit, Hit]


def test_a_producer_that_hashed_learns_of_the_refusal(d):
    d.request("x", Refuse(ticket=d.attach("x").ticket, key=K1, kind="x", reason="y"))
    d.attach("a", P1, provisional=True)
    d.attach("b", P1, provisional=True)
    assert d.attach("a", K1) == d.last("b") == Refused(kind="x", reason="y")
    assert d.store.counts().producing == 0


def test_a_producer_that_hashed_and_does_not_want_to_load_hands_on(d):
    d.attach("a", P1, provisional=True)
    d.attach("b", P1, provisional=True)
    assert d.attach("a", K1, produce=False) == Miss(others=())
    assert isinstance(d.last("b"), Produce)
    d.attach("c", P2, provisional=True)
    assert d.attach("c", K2, produce=False) == Miss(others=())
    assert d.store.counts().producing == 1


def test_an_heir_who_hashes_goes_on_under_the_key_its_predecessor_found(d):
    d.attach("a", P1, provisional=True)
    d.attach("b", P1, provisional=True)
    d.attach("a", K1)
    d.attach("c", K1)
    d.leave("a")
    ticket = d.last("b").ticket
    assert d.attach("b", K1) == Produce(ticket=ticket, others=())
    d.commit("b", ticket)
    assert isinstance(d.last("c"), Hit)


# ---- leases, superseding, eviction -------------------------------------------------------------------------------------------


def test_an_entry_outlives_its_leases(d):
    d.publish("a")
    d.leave("a")
    assert isinstance(d.attach("b"), Hit)
    assert d.closed == []


def test_new_content_supersedes_the_old_when_it_is_there_and_not_before(d):
    old = d.publish("a", K1)
    d.leave("a")
    ticket = d.attach("b", K2).ticket
    assert d.closed == []
    assert d.keys() == [K1]
    d.commit("b", ticket, K2)
    assert d.keys() == [K2]
    assert d.closed == [*old]


def test_superseded_content_stays_until_its_last_lease_ends(d):
    old = d.publish("a", K1)
    d.attach("b", K1)
    d.publish("c", K2)
    assert [(entry.key, entry.superseded) for entry in d.request("x", ListEntries())[0].entries] == [(K1, True), (K2, False)]
    d.leave("a")
    assert d.closed == []
    d.leave("b")
    assert d.closed == [*old]
    assert d.keys() == [K2]


def test_content_that_is_asked_for_again_is_current_again(d):
    d.publish("a", K1)
    d.publish("b", K2)
    assert isinstance(d.attach("c", K1), Hit)
    d.leave("a")
    d.leave("c")
    assert d.closed == []
    assert d.keys() == [K1, K2]


@pytest.mark.parametrize("difference", [{"family": OTHER_FAMILY}, {"slot": "/other"}, {"device": "GPU-1"}])
def test_other_options_places_and_devices_coexist(d, difference):
    d.publish("a", K1)
    d.leave("a")
    d.publish("b", K2, **difference)
    assert d.keys() == [K1, K2]
    assert d.closed == []


def test_eviction_by_key_slot_and_everything(d):
    a, b, c = d.publish("a", K1), d.publish("b", K2, slot="/two"), d.publish("c", K3, slot="/three")
    for name in "abc":
        d.leave(name)
    assert d.request("x", Evict(key=K1)) == [Evicted(freed=(K1,), pending=(), nbytes=30)]
    assert d.request("x", Evict(slot="/two")) == [Evicted(freed=(K2,), pending=(), nbytes=30)]
    assert d.request("x", Evict(everything=True)) == [Evicted(freed=(K3,), pending=(), nbytes=30)]
    assert d.request("x", Evict(everything=True)) == [Evicted(freed=(), pending=(), nbytes=0)]
    assert d.closed == [*a, *b, *c]


@pytest.mark.parametrize(
    ("evict", "code"),
    [
        (Evict(), "malformed"),
        (Evict(key=K1, everything=True), "malformed"),
        (Evict(key=K2), "not_found"),
        (Evict(slot="/no such"), "not_found"),
    ],
)
def test_eviction_of_nothing(d, evict, code):
    d.publish("a")
    assert d.request("x", evict)[0].code == code
    assert d.keys() == [K1]


def test_a_leased_entry_that_is_evicted_is_hidden_and_freed_with_its_last_lease(d):
    first = d.publish("a")
    d.attach("b")
    assert d.request("x", Evict(key=K1)) == [Evicted(freed=(), pending=(K1,), nbytes=0)]
    assert d.request("x", Evict(key=K1)) == [Evicted(freed=(), pending=(K1,), nbytes=0)]
    assert isinstance(d.attach("c"), Produce)
    second = d.commit("c", d.last("c").ticket)
    assert d.last("c") == Committed(key=K1)  # beside the one that is on its way out
    assert d.keys() == [K1, K1]
    d.leave("a")
    assert d.closed == []
    d.leave("b")
    assert d.closed == [*first]
    assert isinstance(d.attach("d"), Hit)
    assert d.lent["d"] == second


def test_room_is_made_from_unleased_entries_of_the_device_oldest_use_first(d):
    for name, key, slot in (("a", K1, "/1"), ("b", K2, "/2"), ("c", K3, "/3")):
        d.now += 1
        d.publish(name, key, slot=slot)
        d.leave(name)
    d.now += 1
    d.publish("g", "4" * 32, slot="/4", device="GPU-1")
    d.leave("g")
    d.now += 1
    d.attach("a2", K1, slot="/1")
    d.leave("a2")  # K1 was used last
    d.attach("lease", K2, slot="/2")
    assert d.request("x", MakeRoom(device="cpu", nbytes=0)) == [Evicted(freed=(), pending=(), nbytes=0)]
    assert d.request("x", MakeRoom(device="cpu", nbytes=1)) == [Evicted(freed=(K3,), pending=(), nbytes=30)]
    assert d.request("x", MakeRoom(device="cpu", nbytes=10**9)) == [Evicted(freed=(K1,), pending=(), nbytes=30)]
    assert d.keys() == [K2, "4" * 32]


def test_what_an_operator_sees(d):
    d.publish("a", label="llama")
    d.now += 10
    d.attach("b")
    d.leave("a")
    d.leave("b")
    d.now += 5
    (entry,) = d.request("x", ListEntries())[0].entries
    assert (entry.key, entry.label, entry.nbytes, entry.segments, entry.leases, entry.hits) == (K1, "llama", 30, 2, 0, 1)
    assert (entry.age_s, entry.idle_s) == (15, 5)


# ---- the end -----------------------------------------------------------------------------------------------------------------


def test_stop_answers_everybody_and_closes_everything(d):
    fds = d.publish("a")
    d.attach("p", K2)
    d.attach("w", K2)
    assert d.request("x", Stop()) == [Stopping()]
    assert d.exited
    assert d.last("w").code == "stopping"
    assert d.closed == [*fds]
    late = d.commit("p", 1, K2)
    assert d.last("p").code == "stopping"
    assert d.closed == [*fds, *late]
    d.leave("a")
    d.leave("w")
    d.later(1000)
    d.event(Shutdown())
    assert d.closed == [*fds, *late]


def test_what_was_sent_is_delivered_before_descriptors_are_closed():
    store = Store()
    commit = Commit(
        ticket=0, key=K1, device="cpu", slot="s", family=FAMILY, fields=b"", manifest=b"", memory="memfd", segments=(1,)
    )
    store.handle(Received(1, commit, (7,)), now_s=0)
    assert store.handle(Shutdown(), now_s=0) == [Exit(), CloseFds((7,))]


def test_engaged_connections_are_those_with_a_reason_to_be_silent(d):
    d.attach("producer")
    d.attach("waiter")
    d.publish("holder", K2)
    d.request("admin", Status())
    numbers = d._numbers
    assert {name for name in numbers if d.store.is_engaged(numbers[name])} == {"producer", "waiter", "holder"}
    assert not d.store.is_engaged(99)


def test_the_driver_notices_a_double_close(d):
    d.closed.append(100)
    d.publish("a")  # takes tokens 100 and 101
    d.leave("a")
    with pytest.raises(AssertionError, match="closed twice"):
        d.request("x", Evict(key=K1))
