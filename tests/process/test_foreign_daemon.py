"""Daemons that hang, answer something else, or are no daemons."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest
from wire_helpers import (
    HEADER,
    K1,
    TIMEOUT_S,
    framing_bytes,
    wanted,
)

from torchwcache.errors import (
    DaemonTimeoutError,
    DaemonUnavailable,
    ProtocolError,
    ProtocolVersionError,
)
from torchwcache.wire import framing
from torchwcache.wire.client import DaemonConnection
from torchwcache.wire.messages import Committed, Failure, Hit, Status

# ---- daemons that misbehave --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def impostor(path, behave):
    """Something of this user's that listens at the daemon's place."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    listener.bind(path)
    os.umask(umask)
    listener.listen(5)
    listener.settimeout(TIMEOUT_S)
    kept = []

    def serve():
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        kept.append(connection)
        behave(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join(TIMEOUT_S)
        for sock in (*kept, listener):
            sock.close()


def reply_with(data):
    def behave(connection):
        connection.recv(65536)
        connection.sendall(data)

    return behave


def test_a_hung_daemon_is_a_timeout(private_socket):
    with impostor(private_socket, lambda connection: None), DaemonConnection.connect(private_socket, timeout_s=0.2) as connection:
        with pytest.raises(DaemonTimeoutError, match=r"did not answer `attach` in time \(timeout 0\.2 s\)"):
            connection.attach(wanted())
        assert connection.is_closed
        with pytest.raises(DaemonUnavailable, match="closed after DaemonTimeoutError"):
            connection.status()


def test_a_stopped_daemon_is_a_timeout_even_when_its_backlog_is_full(private_socket):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, contextlib.ExitStack() as stack:
        umask = os.umask(0o177)
        listener.bind(private_socket)
        os.umask(umask)
        listener.listen(0)
        with pytest.raises(DaemonTimeoutError, match="did not accept a connection"):  # noqa: PT012 - the kernel rounds the backlog up
            for _ in range(10):
                stack.enter_context(DaemonConnection.connect(private_socket, timeout_s=0.2))


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolError, "not served by a torchwcache daemon"),
        (b"\0" * 64, ProtocolError, "not served by a torchwcache daemon"),
        (HEADER.pack(framing.MAGIC, 2, 0, 0), ProtocolVersionError, "speaks protocol version 2, this process version 1"),
        (
            framing_bytes(Failure(code="protocol_version", message="m", protocol=3)),
            ProtocolVersionError,
            "speaks protocol version 3",
        ),
        (HEADER.pack(framing.MAGIC, 1, 0, 2**31), ProtocolError, "payload of 2147483648 bytes"),
        (HEADER.pack(framing.MAGIC, 1, 0, 3) + b"\xc1\xc1\xc1", ProtocolError, "malformed"),
        (framing_bytes(Committed(key=K1)), ProtocolError, "`status` was answered by Committed"),
        (framing_bytes(Status()), ProtocolError, "malformed"),
        (framing_bytes(Failure(code="from the future", message="m")), ProtocolError, "answered `status`: m"),
    ],
)
def test_a_foreign_daemon(private_socket, data, error, says):
    with impostor(private_socket, reply_with(data)), DaemonConnection.connect(private_socket, timeout_s=5) as connection:
        with pytest.raises(error, match=says) as caught:
            connection.status()
        assert private_socket in str(caught.value)
        assert caught.value.path == private_socket


def test_a_hit_without_its_descriptors_is_refused(private_socket):
    hit = Hit(key=K1, manifest=b"", memory="memfd", segments=(1,), waited=False)
    with (
        impostor(private_socket, reply_with(framing_bytes(hit))),
        DaemonConnection.connect(private_socket, timeout_s=5) as connection,
        pytest.raises(ProtocolError, match="0 file descriptors instead of 1"),
    ):
        connection.attach(wanted())
