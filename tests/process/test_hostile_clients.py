"""Clients that send garbage or nothing, and a daemon that is out of descriptors (F14, F17)."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import sys
import time

import psutil
import pytest
from wire_helpers import (
    HEADER,
    K1,
    K2,
    TIMEOUT_S,
    answer,
    descriptors_of,
    entry,
    framing_bytes,
    hung_up,
    publish,
    raw,
    wanted,
)

from torchwcache.errors import (
    DaemonError,
    DaemonUnavailable,
    FileLimitError,
)
from torchwcache.wire import framing
from torchwcache.wire.messages import PROTOCOL_VERSION, Committed, Failure, ListEntries, Produce, Status

# ---- peers that misbehave ----------------------------------------------------------------------------------------------------

GARBAGE = {
    "http": (b"GET / HTTP/1.1\r\n\r\n", "malformed"),
    "another version": (HEADER.pack(framing.MAGIC, 9, 0, 3) + b"abc", "protocol_version"),
    "oversize": (HEADER.pack(framing.MAGIC, PROTOCOL_VERSION, 0, framing.MAX_REQUEST_NBYTES + 1), "too_large"),
    "oversize commit": (HEADER.pack(framing.MAGIC, PROTOCOL_VERSION, 3, framing.MAX_PAYLOAD_NBYTES + 1), "too_large"),
    "too many descriptors": (HEADER.pack(framing.MAGIC, PROTOCOL_VERSION, 5000, 3), "too_large"),
    "no msgpack": (HEADER.pack(framing.MAGIC, PROTOCOL_VERSION, 0, 3) + b"\xc1\xc1\xc1", "malformed"),
    "empty": (HEADER.pack(framing.MAGIC, PROTOCOL_VERSION, 0, 0), "malformed"),
    "a reply": (framing_bytes(Failure(code="x", message="y")), "malformed"),
    "missing descriptors": (framing_bytes(Status(), count=2), "malformed"),
    "deep nesting": (HEADER.pack(framing.MAGIC, PROTOCOL_VERSION, 0, 100_000) + b"\x91" * 100_000, "malformed"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_answered_and_dropped_and_harms_nobody(daemon, name):
    data, code = GARBAGE[name]
    with daemon.connect() as bystander, raw(daemon) as sock:
        sock.sendall(data)
        reply = answer(sock)
        assert (type(reply), reply.code, reply.protocol) == (Failure, code, PROTOCOL_VERSION)
        assert hung_up(sock)
        assert bystander.status().pid == daemon.pid


def test_descriptors_where_none_belong_are_closed(daemon, make_memfd):
    with daemon.connect() as bystander, raw(daemon) as sock:
        bystander.status()
        before = descriptors_of(daemon.pid)  # without the raw one, or with it
        socket.send_fds(sock, [framing_bytes(Status(), count=1)], [make_memfd()])
        assert answer(sock).code == "malformed"
        assert hung_up(sock)
        bystander.status()
        assert descriptors_of(daemon.pid) <= before


def test_a_truncated_frame_ends_that_connection_alone(daemon, make_memfd):
    fds = [make_memfd() for _ in range(5)]
    with daemon.connect() as bystander:
        bystander.status()
        before = descriptors_of(daemon.pid)
        for length in (1, 8, 15, 16, 20):
            with raw(daemon) as sock:
                socket.send_fds(sock, [framing_bytes(entry(0, fds), count=5)[:length]], fds)
        bystander.status()
        deadline = time.monotonic() + TIMEOUT_S
        while descriptors_of(daemon.pid) > before:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def limited_daemon(start, **limits):
    """A daemon whose bounds are short enough for a test."""
    store = limits.pop("store", {})
    code = (
        "import sys, json\n"
        "from torchwcache.daemon import server\n"
        "from torchwcache.daemon.limits import ConnectionLimits, StoreLimits\n"
        "limits, store = json.loads(sys.argv[2]), json.loads(sys.argv[3])\n"
        "server.run(sys.argv[1], connection_limits=ConnectionLimits(**limits), store_limits=StoreLimits(**store))\n"
    )
    return start(lambda path: [sys.executable, "-c", code, path, json.dumps(limits), json.dumps(store)])


def test_silent_clients_block_nobody_and_are_dropped(start, make_memfd):
    """F17."""
    daemon = limited_daemon(start, first_request_s=0.3, frame_s=0.3)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(raw(daemon)) for _ in range(20)]
        half = [stack.enter_context(raw(daemon)) for _ in range(20)]
        for sock in half:
            sock.sendall(framing_bytes(Status())[:10])
        publish(daemon, make_memfd)
        client = stack.enter_context(daemon.connect())
        framing.close_fds(client.attach(wanted())[1])
        assert all(hung_up(sock) for sock in silent + half)
        assert client.status().leases == 1  # a lease may be silent


def test_half_a_frame_after_a_whole_one_is_dropped_too(start):
    daemon = limited_daemon(start, frame_s=0.3)
    with raw(daemon) as sock:
        sock.sendall(framing_bytes(Status()))
        answer(sock)
        sock.sendall(framing_bytes(Status())[:10])
        assert hung_up(sock)


def test_idle_connections_without_a_reason_are_dropped(start, make_memfd):
    daemon = limited_daemon(start, idle_s=0.3)
    with daemon.connect() as holder, daemon.connect() as producer, daemon.connect() as idle:
        publish(daemon, make_memfd)
        framing.close_fds(holder.attach(wanted())[1])
        producer.attach(wanted(K2))
        idle.status()
        deadline = time.monotonic() + TIMEOUT_S
        while idle.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert holder.is_alive()
        assert producer.is_alive()
        with pytest.raises(DaemonUnavailable, match="went away"):
            idle.status()


def test_a_client_that_does_not_read_blocks_nobody_and_is_dropped(start, make_memfd):
    daemon = limited_daemon(start, write_s=0.5)
    with daemon.connect() as producer:
        fds = [make_memfd()]
        producer.commit(entry(0, fds, manifest=bytes(20 * 2**20)), fds)
    with raw(daemon) as lazy, daemon.connect() as other:
        lazy.sendall(framing_bytes(wanted()))
        hit, fds = other.attach(wanted())
        framing.close_fds(fds)
        assert len(hit.manifest) == 20 * 2**20
        deadline = time.monotonic() + TIMEOUT_S
        while other.status().leases > 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_client_that_asks_and_does_not_read_costs_the_daemon_one_reply(daemon, make_memfd):
    fds = [make_memfd()]
    for number in range(40):
        with daemon.connect() as producer:  # long names, so that a list of entries has half a megabyte
            names = {"slot": f"{number}/" + "s" * 4000, "device": "d" * 4096, "label": "l" * 4096}
            producer.commit(entry(0, fds, f"{number:032x}", **names), fds)
    with raw(daemon) as greedy, daemon.connect() as other:
        greedy.sendall(framing_bytes(ListEntries()) * 200)
        for _ in range(250):  # the daemon has had its chance to read them all
            other.status()
        assert psutil.Process(daemon.pid).memory_info().rss <= 40 * 2**20
        assert answer(greedy).entries[39].label == "l" * 4096


def test_silence_hands_a_production_on(start, make_memfd):
    daemon = limited_daemon(start, store={"silence_s": 0.4})
    with daemon.connect() as silent, daemon.connect() as heir:
        first, _ = silent.attach(wanted())
        second, _ = heir.attach(wanted())
        assert isinstance(second, Produce)
        fds = [make_memfd()]
        with pytest.raises(DaemonError, match=r"said nothing for 0\.4 s"):
            silent.commit(entry(first.ticket, fds), fds)
        assert heir.commit(entry(second.ticket, fds), fds)[0] == Committed(key=K1)


# ---- file descriptors (F14) --------------------------------------------------------------------------------------------------


def test_the_soft_limit_is_raised_to_the_hard_one(start):
    daemon = start(
        lambda path: ["sh", "-c", f"ulimit -S -n 64; exec {sys.executable} -m torchwcache.daemon --socket {path} --foreground"]
    )
    with daemon.connect() as connection:
        assert connection.status().fd_limit == min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 2**20)


@pytest.fixture
def narrow(start):
    """A daemon with 40 descriptors, hard."""
    return start(
        lambda path: ["sh", "-c", f"ulimit -n 40; exec {sys.executable} -m torchwcache.daemon --socket {path} --foreground"]
    )


def test_a_daemon_without_room_for_segments_names_its_limit_and_lives(narrow, make_memfd):
    fds = [make_memfd() for _ in range(60)]
    with narrow.connect() as connection:
        connection.status()
        before = descriptors_of(narrow.pid)
        with pytest.raises(FileLimitError, match=r"limit is 40.*ulimit -n"):
            connection.commit(entry(0, fds), fds)
        assert descriptors_of(narrow.pid) <= before
        assert connection.commit(entry(0, fds[:5]), fds[:5])[0] == Committed(key=K1)


def test_a_daemon_without_room_for_connections_says_so_and_lives(narrow):
    def crowd():
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(narrow.connect()).status()

    with pytest.raises(FileLimitError, match="limit is 40"):
        crowd()
    deadline = time.monotonic() + TIMEOUT_S
    while descriptors_of(narrow.pid) > 20:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with narrow.connect() as connection:
        assert connection.status().fd_limit == 40


def test_a_client_without_room_names_its_own_limit(daemon, make_memfd):
    publish(daemon, make_memfd, count=30)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with daemon.connect() as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 15, before[1]))
        try:
            with pytest.raises(FileLimitError, match=r"no file descriptors left for 30 more.*ulimit -n") as caught:
                client.attach(wanted())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert caught.value.needed == 30
        assert client.is_closed
    with daemon.connect() as client:
        framing.close_fds(client.attach(wanted())[1])
