"""What a daemon answers besides a hit, and what becomes of a connection."""

from __future__ import annotations

import fcntl
import os
import threading
import time

import pytest
from wire_helpers import (
    K1,
    K2,
    TIMEOUT_S,
    descriptors_of,
    entry,
    publish,
    wanted,
)

from torchwcache.errors import (
    DaemonError,
    DaemonTimeoutError,
    DaemonUnavailable,
    EntryNotFoundError,
    ProtocolError,
    SegmentError,
)
from torchwcache.wire import framing
from torchwcache.wire.messages import Committed, Miss, Produce, Refused

# ---- answers that are errors -------------------------------------------------------------------------------------------------


def test_a_wait_that_is_too_long_is_a_timeout_and_the_connection_lives(daemon):
    with daemon.connect() as producer, daemon.connect() as waiter:
        producer.attach(wanted())
        with pytest.raises(DaemonTimeoutError, match="still being produced") as caught:
            waiter.attach(wanted(wait_s=0.2))
        assert caught.value.path == daemon.socket
        assert waiter.status().producing == 1


def test_a_refusal_is_an_answer(daemon):
    with daemon.connect() as producer, daemon.connect() as waiter:
        produce, _ = producer.attach(wanted())
        replies = []
        thread = threading.Thread(target=lambda: replies.append(waiter.attach(wanted())))
        thread.start()
        deadline = time.monotonic() + TIMEOUT_S
        while producer.status().waiting < 1:
            assert time.monotonic() < deadline
        producer.refuse(produce.ticket, key=K1, kind="gptq", reason="not verified")
        thread.join(TIMEOUT_S)
        assert replies == [(Refused(kind="gptq", reason="not verified"), [])]


def test_abort_and_progress(daemon):
    with daemon.connect() as producer, daemon.connect() as waiter:
        produce, _ = producer.attach(wanted())
        heard = []

        def report():
            while not heard:
                time.sleep(0.02)
            for step in range(5):
                producer.progress(produce.ticket, phase=f"load {step}", done=step, total=5)
            producer.abort(produce.ticket, reason="out of memory")

        thread = threading.Thread(target=report)
        thread.start()
        reply, _ = waiter.attach(wanted(), on_waiting=heard.append)
        thread.join(TIMEOUT_S)
        assert isinstance(reply, Produce)
        assert [waiting.phase for waiting in heard][-5:] == [f"load {step}" for step in range(5)]
        assert isinstance(producer.attach(wanted(produce=False, key=K2))[0], Miss)


def test_a_void_ticket(daemon, make_memfd):
    fds = [make_memfd()]
    with daemon.connect() as connection:
        with pytest.raises(DaemonError, match="has taken over") as caught:
            connection.commit(entry(42, fds), fds)
        assert caught.value.code == "bad_ticket"
        assert connection.status().entries == 0


def test_administration(daemon, make_memfd):
    publish(daemon, make_memfd, K1)
    with daemon.connect() as connection:
        (info,) = connection.entries()
        assert (info.key, info.nbytes, info.slot, info.memory) == (K1, 4096, "/model", "memfd")
        with pytest.raises(EntryNotFoundError, match="torchwcache status"):
            connection.evict(key=K2)
        with pytest.raises(ProtocolError, match="exactly one"):
            connection.evict()
        assert connection.evict(key=K1).freed == (K1,)
        publish(daemon, make_memfd, K2)
        assert connection.make_room("cpu", nbytes=1).nbytes == 4096
        status = connection.status()
        assert (status.pid, status.socket, status.protocol, status.entries) == (daemon.pid, daemon.socket, 1, 0)
        assert status.version


@pytest.mark.parametrize("case", ["unsealed", "half sealed", "too small", "no memfd", "too few", "too many"])
def test_segments_are_checked_before_a_commit(daemon, make_memfd, case, tmp_path):

    with daemon.connect() as connection:
        connection.status()  # it is accepted by now, and counted
        before = descriptors_of(daemon.pid)
        good = make_memfd()
        fds, segments = [good], (4096,)
        if case == "unsealed":
            fds = [make_memfd(seals=0)]
        elif case == "half sealed":
            fds = [make_memfd(seals=fcntl.F_SEAL_SEAL | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)]
        elif case == "too small":
            segments = (4097,)
        elif case == "no memfd":
            fds = [os.open(tmp_path, os.O_RDONLY)]
        elif case == "too few":
            segments = (4096, 4096)
        elif case == "too many":
            fds = [good, make_memfd()]
        with pytest.raises(SegmentError) as caught:
            connection.commit(entry(0, fds, segments=segments), fds)
        assert caught.value.code == "bad_segments"
        assert descriptors_of(daemon.pid) <= before
        assert connection.commit(entry(0, [good]), [good])[0] == Committed(key=K1)


def test_the_daemon_leaks_nothing(daemon, make_memfd):
    def everything():
        with daemon.connect() as connection:
            fds = [make_memfd() for _ in range(3)]
            produce, _ = connection.attach(wanted())
            connection.commit(entry(produce.ticket, fds), fds)
            with daemon.connect() as other:
                framing.close_fds(other.attach(wanted())[1])
                with daemon.connect() as third:
                    framing.close_fds(third.commit(entry(0, fds), fds)[1])
            connection.evict(everything=True)
        framing.close_fds(fds)
        with daemon.connect() as connection:
            while connection.status().entries:
                time.sleep(0.005)

    everything()
    before = descriptors_of(daemon.pid)
    for _ in range(20):
        everything()
    assert descriptors_of(daemon.pid) <= before + 1  # a connection that is being closed at this moment


# ---- connections in threads --------------------------------------------------------------------------------------------------


def test_a_heartbeat_thread_may_send_while_the_main_thread_asks(daemon, make_memfd):
    with daemon.connect() as connection:
        produce, _ = connection.attach(wanted())
        done = threading.Event()

        def beat():
            while not done.is_set():
                connection.progress(produce.ticket, phase="load")

        thread = threading.Thread(target=beat)
        thread.start()
        for _ in range(200):
            connection.status()
        fds = [make_memfd()]
        reply, _ = connection.commit(entry(produce.ticket, fds, manifest=bytes(5 * 2**20)), fds)
        done.set()
        thread.join(TIMEOUT_S)
        assert reply == Committed(key=K1)


def test_closing_ends_a_wait_in_another_thread(daemon):
    with daemon.connect() as producer, daemon.connect() as waiter:
        producer.attach(wanted())
        errors = []

        def wait():
            try:
                waiter.attach(wanted())
            except DaemonError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        deadline = time.monotonic() + TIMEOUT_S
        while producer.status().waiting < 1:
            assert time.monotonic() < deadline
        waiter.close()
        waiter.close()
        thread.join(TIMEOUT_S)
        assert [str(error) for error in errors] == [f"{daemon.socket}: the connection was closed"]


def test_an_interrupted_wait_closes_the_connection(daemon):
    with daemon.connect() as producer, daemon.connect() as waiter:
        producer.attach(wanted())

        def interrupt(waiting):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            waiter.attach(wanted(), on_waiting=interrupt)
        assert waiter.is_closed
        with pytest.raises(DaemonUnavailable, match="closed after KeyboardInterrupt in `attach`"):
            waiter.status()
