"""Frames: a header that never changes, a msgpack payload, and file descriptors alongside. Imports no torch.

A frame is ``header | payload``. The header (16 bytes, big endian) holds the magic, the protocol version, the number of file
descriptors and the length of the payload. Descriptors travel as ``SCM_RIGHTS`` with bytes of their own frame, in batches of at most
253 (``SCM_MAX_FD`` of Linux): the first with the header, each further one with a byte of the payload. A reader never asks the
kernel for bytes beyond the current frame, so every descriptor it gets belongs to that frame.

:class:`FrameReader` and :class:`FrameWriter` are incremental and never block; the daemon calls them when its selector says so,
a client through :func:`receive` and :func:`send`, which wait, with a deadline.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from torchwcache.errors import ProtocolError, ProtocolVersionError
from torchwcache.wire.messages import PROTOCOL_VERSION, Reply, Request

__all__ = [
    "FDS_PER_BATCH",
    "HEADER_NBYTES",
    "MAGIC",
    "MAX_FDS",
    "MAX_PAYLOAD_NBYTES",
    "MAX_REQUEST_NBYTES",
    "Frame",
    "FrameReader",
    "FrameWriter",
    "PeerClosed",
    "close_fds",
    "decode_reply",
    "decode_request",
    "encode",
    "receive",
    "reply_limit",
    "request_limit",
    "send",
]

MAGIC = b"TWCACHE\n"
MAX_PAYLOAD_NBYTES = 256 * 2**20
"""Cap of a frame that carries descriptors (a commit, a hit), and of every reply."""
MAX_REQUEST_NBYTES = 4 * 2**20
"""Cap of a request without descriptors: everything but a commit."""
MAX_FDS = 4096
"""Most descriptors in one frame. Entries have few large segments; this many means that something is wrong."""
FDS_PER_BATCH = 253
"""``SCM_MAX_FD`` of Linux: a ``sendmsg`` with more fails with EINVAL."""

_HEADER = struct.Struct(">8sHHI")
HEADER_NBYTES = _HEADER.size
_FD_NBYTES = array.array("i").itemsize
_ANCILLARY_NBYTES = socket.CMSG_SPACE(FDS_PER_BATCH * _FD_NBYTES)
_CHUNK_NBYTES = 2**16
_READ_BUDGET_NBYTES = 4 * 2**20
"""What one call of :meth:`FrameReader.read` takes at most: a large commit must not keep the daemon from its other clients."""


class PeerClosed(ConnectionError):
    """The stream ended. ``partial`` says that this happened inside a frame. Always translated before it reaches a user."""

    def __init__(self, *, partial: bool) -> None:
        super().__init__("the peer closed the connection" + (" in the middle of a frame" if partial else ""))
        self.partial = partial


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors; one that is closed already does not keep the others open."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise


class Frame:
    """A received frame. It owns its descriptors until :meth:`take`; leaving the ``with`` closes what was not taken.

    Attributes:
        payload: The msgpack bytes.
        fds: The descriptors, close-on-exec.
        starved: Descriptors were sent but this process has no room for them (``RLIMIT_NOFILE``); ``fds`` is empty then.
        announced: How many descriptors the sender announced.
    """

    __slots__ = ("announced", "fds", "payload", "starved")

    def __init__(self, payload: bytearray, fds: list[int], *, starved: bool, announced: int) -> None:
        self.payload = payload
        self.fds = fds
        self.starved = starved
        self.announced = announced

    def take(self) -> list[int]:
        """Hand the descriptors to the caller, who closes them from now on."""
        fds, self.fds = self.fds, []
        return fds

    def close(self) -> None:
        """Close the descriptors that nobody took. Idempotent."""
        close_fds(self.take())

    def __enter__(self) -> Frame:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def request_limit(fds: int) -> int:
    """Largest payload of a request with that many descriptors: only a commit has any, and only a commit may be large."""
    return MAX_PAYLOAD_NBYTES if fds else MAX_REQUEST_NBYTES


def reply_limit(fds: int) -> int:
    """Largest payload of a reply."""
    return MAX_PAYLOAD_NBYTES


class FrameReader:
    """Puts frames together from whatever pieces the socket gives.

    Args:
        limit: Largest payload allowed for a frame with a given number of descriptors.
    """

    def __init__(self, limit: Callable[[int], int]) -> None:
        self._limit = limit
        self._header = bytearray()
        self._payload = bytearray()
        # One buffer for every read: a large manifest comes in many pieces, and making one for each costs more than reading it.
        self._piece = memoryview(bytearray(_CHUNK_NBYTES))
        self._expected: tuple[int, int] | None = None
        self._fds: list[int] = []
        self._starved = False

    @property
    def partial(self) -> bool:
        """Whether some bytes of an unfinished frame have arrived."""
        return bool(self._header)

    def read(self, sock: socket.socket) -> Frame | None:
        """Read what is there, without blocking (the socket must be non-blocking).

        Returns:
            A whole frame, or ``None`` when more bytes are needed.

        Raises:
            PeerClosed: The stream ended.
            ProtocolError: Garbage, a payload over the cap, or descriptors that were not announced; all descriptors are closed.
            ProtocolVersionError: The peer speaks another version (``peer`` holds it).
            OSError: The socket failed.
        """
        try:
            return self._read(sock)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Forget an unfinished frame and close its descriptors. Idempotent."""
        fds, self._fds = self._fds, []
        close_fds(fds)
        self._header, self._payload, self._expected, self._starved = bytearray(), bytearray(), None, False

    def _read(self, sock: socket.socket) -> Frame | None:
        budget = _READ_BUDGET_NBYTES
        while self._expected is None:
            piece = self._receive(sock, HEADER_NBYTES - len(self._header))
            if piece is None:
                return None
            self._header += piece
            if len(self._fds) > FDS_PER_BATCH:  # only one batch rides on a header: nobody may pile them up byte by byte
                raise ProtocolError("more file descriptors than one header can carry", code="malformed")
            if not MAGIC.startswith(self._header[: len(MAGIC)]):
                raise ProtocolError(
                    f"this is not the torchwcache protocol: it starts with {bytes(self._header)!r}", code="malformed"
                )
            if len(self._header) == HEADER_NBYTES:
                self._expected = self._parse_header()
        count, nbytes = self._expected
        while len(self._payload) < nbytes:
            if budget <= 0:
                return None
            piece = self._receive(sock, min(nbytes - len(self._payload), _CHUNK_NBYTES))
            if piece is None:
                return None
            self._payload += piece
            budget -= len(piece)
            self._check_count(count)
        self._check_count(count)
        if len(self._fds) < count and not self._starved:
            raise ProtocolError(f"{count} file descriptors announced, {len(self._fds)} received", code="malformed")
        frame = Frame(self._payload, self._fds, starved=self._starved, announced=count)
        self._fds = []
        self.close()
        return frame

    def _parse_header(self) -> tuple[int, int]:
        _, version, count, nbytes = _HEADER.unpack(self._header)
        if version != PROTOCOL_VERSION:
            raise ProtocolVersionError(
                f"the peer speaks protocol version {version}, this is version {PROTOCOL_VERSION}: run the same torchwcache version"
                " on both sides, and restart the daemon after an upgrade",
                code="protocol_version",
                peer=version,
            )
        if count > MAX_FDS:
            raise ProtocolError(f"{count} file descriptors in one frame, at most {MAX_FDS} are allowed", code="too_large")
        if nbytes > (limit := self._limit(count)):
            raise ProtocolError(f"a payload of {nbytes} bytes, at most {limit} are allowed here", code="too_large")
        return count, nbytes

    def _check_count(self, count: int) -> None:
        if len(self._fds) > count:
            raise ProtocolError(f"{count} file descriptors announced, more received", code="malformed")

    def _receive(self, sock: socket.socket, nbytes: int) -> memoryview | None:
        """What has arrived, ``nbytes`` at most; valid until the next call."""
        try:
            got, ancillary, flags, _ = sock.recvmsg_into([self._piece[:nbytes]], _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(content[: len(content) - len(content) % _FD_NBYTES])
                self._fds += received
        if flags & socket.MSG_CTRUNC:
            # Our buffer holds the most that one message can carry, so the kernel cut the list because this process has no free
            # descriptors. The rest of the frame is still read: the connection stays in step, and the peer gets an answer.
            self._starved = True
        if self._starved:
            fds, self._fds = self._fds, []
            close_fds(fds)
        if not got:
            raise PeerClosed(partial=self.partial)
        return self._piece[:got]


class _Outgoing:
    """A frame on its way out."""

    __slots__ = ("batches", "header", "payload", "sent")

    def __init__(self, payload: bytes, fds: Sequence[int]) -> None:
        self.header = memoryview(_HEADER.pack(MAGIC, PROTOCOL_VERSION, len(fds), len(payload)))
        self.payload = memoryview(payload)
        self.batches = deque(fds[i : i + FDS_PER_BATCH] for i in range(0, len(fds), FDS_PER_BATCH))
        self.sent = 0

    @property
    def remaining(self) -> int:
        return HEADER_NBYTES + len(self.payload) - self.sent

    def send(self, sock: socket.socket) -> None:
        if self.sent == 0:
            batch, until = bool(self.batches), HEADER_NBYTES
        elif self.sent < HEADER_NBYTES:
            batch, until = False, HEADER_NBYTES
        else:
            batch, until = bool(self.batches), self.sent + 1
        if len(self.batches) <= batch:  # nothing is left that would need a byte of its own
            until = HEADER_NBYTES + len(self.payload)
        pieces = [self.header[self.sent : until], self.payload[max(self.sent - HEADER_NBYTES, 0) : max(until - HEADER_NBYTES, 0)]]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self.batches[0]))] if batch else []
        # The kernel attaches the descriptors to the first byte: a short write has sent all of them.
        self.sent += sock.sendmsg(pieces, ancillary, socket.MSG_NOSIGNAL)
        if batch:
            self.batches.popleft()


class FrameWriter:
    """A queue of frames. It borrows their descriptors: the caller keeps them open until the frame is out."""

    def __init__(self) -> None:
        self._queue: deque[_Outgoing] = deque()

    @property
    def pending_nbytes(self) -> int:
        """Bytes that the socket has not taken yet."""
        return sum(outgoing.remaining for outgoing in self._queue)

    def push(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame.

        Raises:
            ProtocolError: It is over a cap.
        """
        if len(fds) > MAX_FDS or len(payload) > MAX_PAYLOAD_NBYTES:
            raise ProtocolError(
                f"a message of {len(payload)} bytes with {len(fds)} file descriptors is too large: at most {MAX_PAYLOAD_NBYTES}"
                f" bytes and {MAX_FDS} descriptors",
                code="too_large",
            )
        assert len(payload) * FDS_PER_BATCH >= len(fds), "each further batch of descriptors rides on a byte of the payload"
        self._queue.append(_Outgoing(payload, fds))

    def flush(self, sock: socket.socket) -> bool:
        """Write as much as the socket takes, without blocking.

        Returns:
            Whether everything is out.

        Raises:
            OSError: The peer is gone (EPIPE), or too many descriptors are in flight (ETOOMANYREFS; nothing was lost).
        """
        while self._queue:
            outgoing = self._queue[0]
            try:
                outgoing.send(sock)
            except BlockingIOError:
                return False
            if not outgoing.remaining:
                self._queue.popleft()
        return True


_encoder = msgspec.msgpack.Encoder()
_decode_request: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Request)
_decode_reply: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Reply)

_M = TypeVar("_M")


def encode(message: Request | Reply) -> bytes:
    """A message as payload bytes. Bytes of a file name that are no text, as in a slot or a reason, are written as escapes."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        texts = {name: getattr(message, name) for name in message.__struct_fields__}
        escaped = {name: text.encode(errors="backslashreplace").decode() for name, text in texts.items() if isinstance(text, str)}
        return _encoder.encode(msgspec.structs.replace(message, **escaped))


def _decode(decoder: msgspec.msgpack.Decoder[_M], payload: bytes | bytearray) -> _M:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed message: {error}", code="malformed") from error


def decode_request(payload: bytes | bytearray) -> Request:
    """Read a request.

    Raises:
        ProtocolError: Not a request of this version; the message carries the path of the offending field.
    """
    return _decode(_decode_request, payload)  # type: ignore[no-any-return]


def decode_reply(payload: bytes | bytearray) -> Reply:
    """Read a reply.

    Raises:
        ProtocolError: Not a reply of this version; the message carries the path of the offending field.
    """
    return _decode(_decode_reply, payload)  # type: ignore[no-any-return]


def _wait(sock: socket.socket, events: int, deadline_s: float) -> None:
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    if sock.fileno() < 0:  # closed by another thread
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    poll = select.poll()
    poll.register(sock, events)
    if not poll.poll(remaining_s * 1000):
        raise TimeoutError


def receive(sock: socket.socket, reader: FrameReader, deadline_s: float) -> Frame:
    """Wait for a whole frame, until ``deadline_s`` on the monotonic clock.

    Raises:
        TimeoutError: The deadline passed.
        PeerClosed: As :meth:`FrameReader.read`, which see for the others.
    """
    while (frame := reader.read(sock)) is None:
        _wait(sock, select.POLLIN, deadline_s)
    return frame


def send(sock: socket.socket, payload: bytes, fds: Sequence[int], deadline_s: float) -> None:
    """Write a whole frame, until ``deadline_s`` on the monotonic clock.

    Raises:
        TimeoutError: The deadline passed; part of the frame may be out, so the connection is of no more use.
        ProtocolError: The frame is over a cap; nothing was sent.
        OSError: The peer is gone, or too many descriptors are in flight.
    """
    writer = FrameWriter()
    writer.push(payload, fds)
    while not writer.flush(sock):
        _wait(sock, select.POLLOUT, deadline_s)
