"""What tests of the wire say to a daemon."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import time

from torchwcache.wire import framing
from torchwcache.wire.messages import PROTOCOL_VERSION, Attach, Commit, Committed

K1, K2, FAMILY = "1" * 32, "2" * 32, "f" * 32
HEADER = struct.Struct(">8sHHI")
TIMEOUT_S = 20.0


def wanted(key=K1, **more):
    return Attach(**{"key": key, "device": "cpu", "slot": "/model", "family": FAMILY, "fields": b"fields", **more})


def entry(ticket, fds, key=K1, **more):
    common = {"key": key, "device": "cpu", "slot": "/model", "family": FAMILY, "fields": b"fields", "manifest": b"manifest"}
    segments = tuple(os.fstat(fd).st_size for fd in fds)
    return Commit(**{"ticket": ticket, **common, "memory": "memfd", "segments": segments, **more})


def publish(daemon, make_memfd, key=K1, *, count=1, content=b"weights"):
    """An unleased entry."""
    with daemon.connect() as connection:
        fds = [make_memfd(content) for _ in range(count)]
        reply, _ = connection.commit(entry(0, fds, key), fds)
        assert reply == Committed(key=key)


def raw(daemon):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(TIMEOUT_S)
    sock.connect(daemon.socket)
    return sock


def answer(sock):
    """The next reply on a raw socket."""
    sock.setblocking(False)
    return framing.decode_reply(
        framing.receive(sock, framing.FrameReader(framing.reply_limit), time.monotonic() + TIMEOUT_S).payload
    )


def hung_up(sock):
    sock.settimeout(TIMEOUT_S)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


CLIENT = (
    "import os, sys\n"
    "from torchwcache.errors import *\n"
    "from torchwcache.wire.client import DaemonConnection\n"
    "from torchwcache.wire.messages import *\n"
    "connection = DaemonConnection.connect(sys.argv[1])\n"
    f"wanted = Attach(key='{K1}', device='cpu', slot='/model', family='{FAMILY}', fields=b'')\n"
    "reply, fds = connection.attach(wanted)\n"
)
"""A client in a process of its own; what it does with the reply is the test's."""


def python(code, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    )


def line_of(process):
    """One line of a child's output; the test's own timeout bounds the wait."""
    return process.stdout.readline().strip()


@contextlib.contextmanager
def child(code, *arguments):
    process = python(code, *arguments)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(TIMEOUT_S)
        process.stdin.close()
        process.stdout.close()


def framing_bytes(message, *, count=0):
    payload = framing.encode(message)
    return HEADER.pack(framing.MAGIC, PROTOCOL_VERSION, count, len(payload)) + payload


def descriptors_of(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))
