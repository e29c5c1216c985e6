"""F19: each failure has its own warning, and its own error where errors are wished for; the model is there in any case."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading

import pytest
from support import plain_models, worker
from wire_helpers import HEADER

from torchwcache.wire import framing

LOW = 1 << 10


@contextlib.contextmanager
def impostor(path, answer):
    """Something of this user's that listens at the daemon's place, and answers everybody the same."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    listener.bind(path)
    os.umask(umask)
    listener.listen(5)
    listener.settimeout(0.05)
    stop = threading.Event()

    def serve():
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(5)
                connection.recv(65536)
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)
        listener.close()


def hurry(here, *, seconds):
    """Wait for an answer of the daemon no longer than this."""
    from torchwcache import attaching

    here.patch(attaching, "_CONNECT_TIMEOUT_S", seconds)


def run_short(here, *, nbytes):
    """Pretend that so much memory is left."""
    from torchwcache.memory.host import HostMemory

    here.patch(HostMemory, "available_nbytes", lambda self: nbytes)


@contextlib.contextmanager
def absent(request, path, linked, crew):
    yield {"mode": "client"}


@contextlib.contextmanager
def hung(request, path, linked, crew):
    daemon = request.getfixturevalue("daemon")
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        yield {}
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


@contextlib.contextmanager
def foreign(request, path, linked, crew):
    with impostor(path, b"HTTP/1.1 400 Bad Request\r\n\r\n"):
        yield {}


@contextlib.contextmanager
def other_version(request, path, linked, crew):
    with impostor(path, HEADER.pack(framing.MAGIC, 99, 0, 0)):
        yield {}


@contextlib.contextmanager
def untrusted(request, path, linked, crew):
    os.chmod(os.path.dirname(path), 0o755)
    try:
        yield {}
    finally:
        os.chmod(os.path.dirname(path), 0o700)


@contextlib.contextmanager
def no_memory(request, path, linked, crew):
    request.getfixturevalue("daemon")
    for one in crew:
        one.do(run_short, nbytes=LOW)
    yield {}


@contextlib.contextmanager
def mismatch(request, path, linked, crew):
    request.getfixturevalue("daemon")
    crew[-1].do(worker.attach, cfg={**linked, "dtype": "float64"})
    yield {}


@contextlib.contextmanager
def refused(request, path, linked, crew):
    request.getfixturevalue("daemon")
    linked["finalize"] = "support.plain_models:wrap"
    crew[-1].fails(worker.attach, cfg=linked)
    yield {}


FAILURES = [
    (absent, "on_unavailable", "DaemonUnavailable", "no daemon"),
    (hung, "on_unavailable", "DaemonTimeoutError", "it hangs or is stopped"),
    (foreign, "on_unavailable", "ProtocolError", "is not served by a torchwcache daemon"),
    (other_version, "on_unavailable", "ProtocolVersionError", "speaks protocol version 99"),
    (untrusted, "on_unavailable", "UntrustedSocketError", "open to others"),
    (no_memory, "on_unavailable", "SegmentMemoryError", "are needed to publish"),
    (mismatch, "on_mismatch", "MismatchError", "dtype"),
    (refused, "on_refused", "RefusedError", "cannot be cached"),
]


@pytest.mark.parametrize(("fail", "policy", "error", "says"), FAILURES, ids=[item[0].__name__ for item in FAILURES])
def test_every_failure_is_named(fail, policy, error, says, request, workers, private_socket, linked):
    plain, one, switched, other = crew = workers.several(4)
    plain.do(worker.load_without_us, cfg=linked)
    expected = plain.do(worker.output)
    for each in crew:
        each.do(hurry, seconds=0.5)
    with fail(request, private_socket, linked, [one, switched, other]) as options:
        for how in ({policy: "error"}, {"fallback": "error"}):
            found = one.fails(worker.attach, cfg=linked, **how, **options)
            assert found.type == error
            assert says in found.text
        switched.do(worker.settle, environment={**workers.environment, "TORCHWCACHE_FALLBACK": "error"})
        assert switched.fails(worker.attach, cfg=linked, **{policy: "load"}, **options).type == error

        report = one.do(worker.attach, cfg=linked, **{policy: "load"}, **options)
    assert report["source"] == "disk"
    (warning,) = report["warnings"]
    assert says in warning
    assert "loading from disk" in warning
    assert report["published"] == (fail is mismatch)
    if fail is not refused:
        assert one.do(worker.output) == expected


def test_the_warnings_are_all_different():
    assert len({says for _, _, _, says in FAILURES}) == len({error for _, _, error, _ in FAILURES}) == len(FAILURES)


def test_a_socket_path_that_is_too_long(workers, linked, tmp_path):
    error = workers().fails(worker.attach, cfg=linked, socket=str(tmp_path / ("x" * 200)))
    assert error.type == "ConfigError"
    assert "TORCHWCACHE_SOCKET" in error.text


def test_mode_off_needs_no_daemon_and_starts_none(workers, private_socket, linked):
    one = workers()
    report = one.do(worker.attach, cfg=linked, mode="off")
    assert (report["source"], report["fingerprint"], report["warnings"]) == ("disk", "", [])
    one.do(worker.settle, environment={**workers.environment, "TORCHWCACHE_MODE": "off"})
    assert one.do(worker.attach, cfg=linked, mode="daemon", name="again")["fingerprint"] == ""
    assert not os.path.exists(private_socket)


@pytest.mark.parametrize("when", ["while loading", "while packing"])
def test_memory_that_runs_out_half_way(when, workers, daemon, tmp_path):
    """There was room when it was asked for, and then there was not: nothing is published, and the model serves."""
    cfg = {
        "checkpoint": plain_models.save(plain_models.Wide, tmp_path / "wide.safetensors"),
        "build": "support.plain_models:Wide",
        "finalize": "support.plain_models:replace_weights",  # so that packing needs segments besides those that were loaded into
    }
    order = {"cfg": cfg, "allocations": 0 if when == "while loading" else 1}
    one, other = workers.several(2)
    report = one.do(attach_until_memory_ends, **order)
    assert (report["source"], report["published"]) == ("disk", False)
    (warning,) = report["warnings"]
    assert "SegmentMemoryError" in warning
    assert one.do(worker.entries) == []
    error = one.fails(attach_until_memory_ends, **order, name="strict", on_unavailable="error")
    assert error.type == "SegmentMemoryError"
    made = other.do(worker.attach, cfg=cfg)
    assert made["published"], "whoever has the memory can publish: no production was left behind"
    assert one.do(worker.output) == other.do(worker.output)
    assert one.do(worker.footprint)["memfds"] == 0


def attach_until_memory_ends(here, *, allocations, **order):
    from torchwcache.errors import SegmentMemoryError
    from torchwcache.memory.host import HostMemory

    allocate, made = HostMemory.allocate, []

    def limited(self, nbytes, **options):
        if len(made) >= allocations:
            raise SegmentMemoryError(f"cannot make a segment of {nbytes} bytes: pretended", nbytes=nbytes)
        made.append(nbytes)
        return allocate(self, nbytes, **options)

    here.patch(HostMemory, "allocate", limited)
    try:
        return worker.attach(here, **order)
    finally:
        here.patches.close()
