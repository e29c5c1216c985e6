"""A real daemon and real clients, each in a process of its own where it matters."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from wire_helpers import (
    CLIENT,
    K1,
    TIMEOUT_S,
    answer,
    child,
    entry,
    framing_bytes,
    line_of,
    publish,
    python,
    raw,
    wanted,
)

from torchwcache.errors import (
    DaemonError,
    DaemonUnavailable,
)
from torchwcache.wire import framing
from torchwcache.wire.messages import Committed, Hit, Produce

# ---- the life of an entry ----------------------------------------------------------------------------------------------------


def test_an_entry_goes_from_producer_to_client_and_outlives_both(daemon, make_memfd):
    with daemon.connect() as producer:
        produce, fds = producer.attach(wanted())
        assert isinstance(produce, Produce)
        assert fds == []
        memory = [make_memfd(b"first"), make_memfd(b"second")]
        assert producer.commit(entry(produce.ticket, memory), memory) == (Committed(key=K1), [])
        for fd in memory:
            os.close(fd)
    with daemon.connect() as client:
        hit, fds = client.attach(wanted())
        assert hit == Hit(key=K1, manifest=b"manifest", memory="memfd", segments=(4096, 4096), waited=False)
        assert [os.pread(fd, 6, 0) for fd in fds] == [b"first\0", b"second"]
        assert not any(os.get_inheritable(fd) for fd in fds)
        assert client.entries()[0].leases == 1
    for fd in fds:
        os.close(fd)


def test_a_hit_is_one_round_trip(daemon, make_memfd, monkeypatch):
    publish(daemon, make_memfd, count=300)
    sent = []
    monkeypatch.setattr(framing, "send", lambda *args, real=framing.send: (sent.append(args[1]), real(*args)))
    with daemon.connect() as client:
        _, fds = client.attach(wanted())
    framing.close_fds(fds)
    assert len(fds) == 300
    assert len(sent) == 1


def test_a_publish_of_what_exists_gets_the_existing_entry(daemon, make_memfd):
    publish(daemon, make_memfd, content=b"original")
    with daemon.connect() as late:
        mine = [make_memfd(b"mine")]
        hit, fds = late.commit(entry(0, mine), mine)
        assert isinstance(hit, Hit)
        assert os.pread(fds[0], 8, 0) == b"original"
        framing.close_fds(fds)


def test_eight_processes_and_one_producer(daemon, make_memfd):
    code = CLIENT + (
        "print(type(reply).__name__, getattr(reply, 'waited', ''), *[os.pread(fd, 7, 0) for fd in fds], flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with contextlib.ExitStack() as stack:
        producer = stack.enter_context(daemon.connect())
        produce, _ = producer.attach(wanted())
        clients = [stack.enter_context(child(code, daemon.socket)) for _ in range(7)]
        observer = stack.enter_context(daemon.connect())
        deadline = time.monotonic() + TIMEOUT_S
        while observer.status().waiting < 7:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        memory = [make_memfd()]
        producer.commit(entry(produce.ticket, memory), memory)
        assert [line_of(client) for client in clients] == ["Hit True b'weights'"] * 7
        assert observer.status().leases == 8


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_producer_that_is_killed_leaves_nothing_and_the_next_takes_over(daemon, number, open_fds):
    code = CLIENT + "print(type(reply).__name__, flush=True)\nsys.stdin.readline()\n"
    with child(code, daemon.socket) as producer, daemon.connect() as heir:
        assert line_of(producer) == "Produce"
        heard = []
        killer = threading.Timer(0.2, producer.send_signal, [number])
        killer.start()
        reply, _ = heir.attach(wanted(), on_waiting=heard.append)
        killer.join()
        assert isinstance(reply, Produce)
        assert heard
        assert heir.entries() == ()


def test_a_killed_client_ends_its_lease(daemon, make_memfd, wait_until):
    publish(daemon, make_memfd)
    code = CLIENT + "print(type(reply).__name__, flush=True)\nsys.stdin.readline()\n"
    with child(code, daemon.socket) as client, daemon.connect() as observer:
        assert line_of(client) == "Hit"
        assert observer.entries()[0].leases == 1
        client.kill()
        wait_until(lambda: observer.entries()[0].leases == 0, what="the lease of a killed client ends")


def test_a_dead_parent_is_seen_although_its_forked_child_lives(daemon, make_memfd, wait_until):
    """D14: the child inherits the socket, and must not keep the lease."""
    publish(daemon, make_memfd)
    code = CLIENT + (
        "if os.fork() == 0:\n"
        "    told = False\n"
        "    try:\n"
        "        connection.status()\n"
        "    except DaemonUnavailable as error:\n"
        "        told = 'parent of this forked process' in str(error)\n"
        "    print('child', os.getpid(), told, connection.fileno(), connection.is_alive(), flush=True)\n"
        "    sys.stdin.readline()\n"
        "    os._exit(0)\n"
        "import time; time.sleep(3600)\n"
    )
    with child(code, daemon.socket) as parent, daemon.connect() as observer:
        word, pid, says_so, fileno, alive = line_of(parent).split()
        assert (word, says_so, fileno, alive) == ("child", "True", "-1", "False")
        assert observer.entries()[0].leases == 1  # the child's closing did not shut the parent's connection
        parent.kill()
        parent.wait(TIMEOUT_S)
        assert psutil.pid_exists(int(pid))
        wait_until(lambda: observer.entries()[0].leases == 0, what="the lease of the dead parent ends")
        assert psutil.pid_exists(int(pid))
        parent.stdin.write("\n")
        parent.stdin.flush()


def test_without_the_fork_hook_the_child_would_keep_the_lease(daemon, make_memfd):
    """The guard of the test above: a socket that is not ours to close behaves as D14 says."""
    sock = raw(daemon)
    sock.sendall(framing_bytes(wanted()))
    assert isinstance(answer(sock), Produce)
    code = "import sys; print('ready', flush=True); sys.stdin.readline()"
    holder = python(code, pass_fds=[sock.fileno()])
    try:
        assert line_of(holder) == "ready"
        sock.close()
        with daemon.connect() as observer:
            assert observer.status().producing == 1
    finally:
        holder.kill()
        holder.wait(TIMEOUT_S)
        holder.stdin.close()
        holder.stdout.close()


# ---- one daemon, and its end -------------------------------------------------------------------------------------------------


def test_a_second_daemon_says_who_is_there_and_leaves_it_alone(daemon):
    """F18."""
    second = subprocess.run(
        [sys.executable, "-m", "torchwcache.daemon", "--socket", daemon.socket, "--foreground"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert second.returncode != 0
    assert f"process {daemon.pid} holds the lock" in second.stderr
    with daemon.connect() as connection:
        assert connection.status().pid == daemon.pid


def test_a_second_daemon_finds_the_first_even_when_its_lock_file_was_removed(daemon):
    os.unlink(daemon.socket + ".lock")
    second = subprocess.run(
        [sys.executable, "-m", "torchwcache.daemon", "--socket", daemon.socket, "--foreground"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert second.returncode != 0
    assert f"process {daemon.pid} listens there" in second.stderr
    with daemon.connect() as connection:
        assert connection.status().pid == daemon.pid


def test_the_socket_of_a_killed_daemon_is_replaced(daemon, daemon_class):
    daemon.kill()
    assert Path(daemon.socket).is_socket()
    with pytest.raises(DaemonUnavailable, match="torchwcache daemon"):
        daemon.connect()
    second = daemon_class(daemon.socket)
    try:
        with second.wait_ready().connect() as connection:
            assert connection.status().pid == second.pid
    finally:
        second.end()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, "stop"])
def test_a_clean_end_removes_the_socket_and_tells_who_waits(daemon, how, make_memfd):
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
        if how == "stop":
            with daemon.connect() as connection:
                connection.stop()
            assert not Path(daemon.socket).exists()
        else:
            daemon.process.send_signal(how)
        assert daemon.process.wait(TIMEOUT_S) == 0
        thread.join(TIMEOUT_S)
        assert [type(error) for error in errors] == [DaemonUnavailable]
        assert not producer.is_alive()
    assert not Path(daemon.socket).exists()


def test_killing_the_daemon_harms_no_client(daemon, make_memfd):
    publish(daemon, make_memfd)
    with daemon.connect() as client:
        _, fds = client.attach(wanted())
        assert client.is_alive()
        daemon.kill()
        assert not client.is_alive()
        assert os.pread(fds[0], 7, 0) == b"weights"
        with pytest.raises(DaemonUnavailable, match="went away"):
            client.status()
    framing.close_fds(fds)


def test_a_daemon_that_dies_in_the_middle_of_a_request(daemon):
    with daemon.connect() as producer, daemon.connect() as waiter:
        producer.attach(wanted())
        killer = threading.Timer(0.2, daemon.kill)
        killer.start()
        with pytest.raises(DaemonUnavailable, match="went away when it was to answer `attach`"):
            waiter.attach(wanted())
        killer.join()
        assert waiter.is_closed


def test_a_daemon_whose_socket_was_removed_listens_again(daemon, wait_until):
    os.unlink(daemon.socket)

    def back():
        try:
            with daemon.connect() as connection:
                return connection.status().pid == daemon.pid
        except DaemonUnavailable:
            return False

    wait_until(back, what="the daemon listens again")


def test_a_daemon_whose_place_was_taken_goes_with_its_last_client(daemon, daemon_class):
    client = daemon.connect()
    client.status()
    daemon.process.send_signal(signal.SIGSTOP)
    for suffix in ("", ".lock"):
        os.unlink(daemon.socket + suffix)
    second = daemon_class(daemon.socket)
    try:
        second.wait_ready()
        daemon.process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + TIMEOUT_S
        while "another daemon has taken this place" not in daemon.log:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert client.status().pid == daemon.pid
        client.close()
        assert daemon.process.wait(TIMEOUT_S) == 0
        with second.connect() as connection:
            assert connection.status().pid == second.pid
    finally:
        client.close()
        second.end()


def test_idle_timeout(start):
    daemon = start(
        lambda path: [sys.executable, "-m", "torchwcache.daemon", "--socket", path, "--foreground", "--idle-timeout", "0.5"]
    )
    with daemon.connect() as connection:
        connection.status()
        time.sleep(0.7)  # longer than the timeout: a client keeps it
        assert connection.is_alive()
    assert daemon.process.wait(TIMEOUT_S) == 0


# ---- weight ------------------------------------------------------------------------------------------------------------------


def test_the_daemon_imports_no_torch_and_stays_small(daemon, make_memfd):
    publish(daemon, make_memfd, count=100)
    with daemon.connect() as connection:
        connection.status()
    mapped = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "torch/lib" not in mapped
    assert "numpy" not in mapped
    assert psutil.Process(daemon.pid).memory_info().rss <= 40 * 2**20


@pytest.mark.parametrize("module", ["torchwcache.daemon.__main__", "torchwcache.daemon.supervisor", "torchwcache.wire.client"])
def test_no_torch_is_imported(module):
    code = f"import sys, {module}; print([name for name in ('torch', 'numpy', 'asyncio', 'safetensors') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert done.stdout.strip() == "[]"
