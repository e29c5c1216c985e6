"""The client's end of a connection to the daemon. Imports no torch.

A connection is a lease: the entry that it attached or committed stays as long as it is open. Everything here has a bound, and
every failure is one of ``torchwcache.errors`` and names the socket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from torchwcache.errors import DaemonUnavailable, ProtocolError, ProtocolVersionError, UntrustedSocketError, WeightCacheError
from torchwcache.wire import failures, framing
from torchwcache.wire.address import check_path, check_peer, check_socket
from torchwcache.wire.messages import (
    WAITING_INTERVAL_S,
    Abort,
    Aborted,
    Attach,
    Commit,
    Committed,
    DaemonStatus,
    Entries,
    EntryInfo,
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
    Request,
    Status,
    Stop,
    Stopping,
    Waiting,
)

__all__ = ["DaemonConnection"]

_CONNECT_RETRY_S = 0.01
_MIN_SILENCE_S = 5 * WAITING_INTERVAL_S

_R = TypeVar("_R")
AttachReply: TypeAlias = Hit | Produce | Miss | Refused

# A forked child inherits the socket, and with it the lease: the daemon would take a dead parent for alive as long as the child
# runs. So children close what their parents had open (D14). The lock keeps a fork from falling between making a socket and
# registering it; it is reentrant for the sake of a fork in a signal handler.
_live: weakref.WeakSet[DaemonConnection] = weakref.WeakSet()
_live_lock = threading.RLock()


def _after_fork_in_child() -> None:
    global _live_lock
    _live_lock = threading.RLock()
    for connection in list(_live):
        connection._abandon()


os.register_at_fork(
    before=lambda: _live_lock.acquire(),
    after_in_parent=lambda: _live_lock.release(),
    after_in_child=_after_fork_in_child,
)


class DaemonConnection:
    """An open connection to a daemon, made by :meth:`connect`.

    One request at a time; :meth:`progress` alone may be called from another thread meanwhile. After a timeout or a violation of
    the protocol the connection is closed, since the next reply could belong to the last request.
    """

    def __init__(self, sock: socket.socket, path: str, *, timeout_s: float) -> None:
        self._sock = sock
        self._path = path
        self._timeout_s = timeout_s
        self._reader = framing.FrameReader(framing.reply_limit)
        self._request_lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._closed_because: str | None = None

    @classmethod
    def connect(cls, path: str, *, timeout_s: float = 10.0) -> DaemonConnection:
        """Connect to the daemon at ``path``.

        Args:
            path: The socket.
            timeout_s: Bound for connecting, and for every answer of the daemon from then on.

        Raises:
            ConfigError: The path is too long for a socket.
            DaemonUnavailable: Nothing is there, or nobody listens.
            UntrustedSocketError: What is there is not this user's alone.
            DaemonTimeoutError: The daemon accepts no connections.
            FileLimitError: This process has no descriptors left.
        """
        path = check_path(path)
        check_socket(path)
        with _live_lock:
            try:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            except OSError as error:
                if failures.is_file_limit(error):
                    raise failures.no_files_left(path) from error
                raise
            connection = cls(sock, path, timeout_s=timeout_s)
            _live.add(connection)
        try:
            sock.setblocking(False)
            _connect(sock, path, timeout_s)
            check_peer(sock, path)
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def path(self) -> str:
        """The daemon's socket."""
        return self._path

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called, by the user or after an error."""
        return self._closed_because is not None

    def fileno(self) -> int:
        """The socket's descriptor, for selectors; -1 when closed."""
        return self._sock.fileno()

    def is_alive(self) -> bool:
        """Whether the daemon still holds the other end. A hung one counts as alive."""
        if self.is_closed:
            return False
        try:
            return self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Close the connection and end its lease. Idempotent."""
        self._close("the connection was closed")

    def _close(self, because: str) -> None:
        if self._closed_because is None:
            self._closed_because = because
        _live.discard(self)
        # A heartbeat may be sending at this moment: shutting down first makes it fail, instead of writing to whatever file gets
        # the same number next.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._send_lock:
            self._sock.close()

    def _abandon(self) -> None:
        """In a forked child: let go without a shutdown, which would end the parent's lease too."""
        self._request_lock, self._send_lock = threading.Lock(), threading.Lock()
        self._closed_because = "the connection belongs to the parent of this forked process; connect anew here"
        self._sock.close()
        self._reader.close()

    def __enter__(self) -> DaemonConnection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- requests ------------------------------------------------------------------------------------------------------------

    def attach(self, request: Attach, *, on_waiting: Callable[[Waiting], None] | None = None) -> tuple[AttachReply, list[int]]:
        """Ask for an entry; wait while somebody else produces it, ``request.wait_s`` at most.

        Args:
            request: What to attach.
            on_waiting: Called with every report about the producer.

        Returns:
            The reply, and for a :class:`Hit` the descriptors of its segments, which the caller owns.

        Raises:
            DaemonTimeoutError: The producer took longer than ``wait_s`` (the connection stays open), or the daemon hangs.
            DaemonError: See the other classes of ``torchwcache.errors``.
        """
        return self._exchange(request, (), (Hit, Produce, Miss, Refused), wait_s=request.wait_s, on_waiting=on_waiting)

    def progress(self, ticket: int, *, phase: str, done: int = 0, total: int = 0) -> None:
        """Tell that this producer is alive. Not answered; may be called from any thread.

        Raises:
            DaemonUnavailable: The connection is gone.
        """
        self._send(Progress(ticket=ticket, phase=phase, done=done, total=total))

    def commit(self, request: Commit, fds: Sequence[int]) -> tuple[Committed | Hit, list[int]]:
        """Publish an entry. The descriptors stay the caller's.

        Returns:
            ``Committed``; or ``Hit`` with the descriptors of the entry that was there already, which the caller owns.

        Raises:
            SegmentError: The daemon found a segment that is not what the message says.
            DaemonError: ``code="bad_ticket"``: this producer was silent for too long, and another one has taken over.
        """
        return self._exchange(request, fds, (Committed, Hit))

    def refuse(self, ticket: int, *, key: str, kind: str, reason: str) -> None:
        """Say that this fingerprint cannot be cached; whoever waits for it is told."""
        self._call(Refuse(ticket=ticket, key=key, kind=kind, reason=reason), Aborted)

    def abort(self, ticket: int, *, reason: str) -> None:
        """Give a production up; whoever waits first takes over."""
        self._call(Abort(ticket=ticket, reason=reason), Aborted)

    def entries(self) -> tuple[EntryInfo, ...]:
        """What is cached, oldest first."""
        return self._call(ListEntries(), Entries).entries

    def evict(
        self, *, key: str | None = None, slot: str | None = None, everything: bool = False, refusals: bool = False
    ) -> Evicted:
        """Free entries; leased ones when their last lease ends.

        Raises:
            EntryNotFoundError: ``key`` or ``slot`` names nothing.
        """
        return self._call(Evict(key=key, slot=slot, everything=everything, refusals=refusals), Evicted)

    def make_room(self, device: str, *, nbytes: int) -> Evicted:
        """Free unleased entries on ``device``, oldest use first, until ``nbytes`` are freed or none is left."""
        return self._call(MakeRoom(device=device, nbytes=nbytes), Evicted)

    def status(self) -> DaemonStatus:
        """The daemon itself."""
        return self._call(Status(), DaemonStatus)

    def stop(self) -> None:
        """Make the daemon exit, and wait until it has given up its socket. Clients keep what they mapped."""
        self._call(Stop(), Stopping)
        deadline_s = time.monotonic() + self._timeout_s
        while self.is_alive() and time.monotonic() < deadline_s:
            select.select([self._sock], [], [], _CONNECT_RETRY_S)
        self._close("the daemon was stopped")

    # ---- one request, one reply ----------------------------------------------------------------------------------------------

    def _call(self, request: Request, expected: type[_R]) -> _R:
        reply: _R = self._exchange(request, (), (expected,))[0]
        return reply

    def _exchange(
        self,
        request: Request,
        fds: Sequence[int],
        expected: tuple[type, ...],
        *,
        wait_s: float = 0.0,
        on_waiting: Callable[[Waiting], None] | None = None,
    ) -> tuple[Any, list[int]]:
        what = str(type(request).__struct_config__.tag)
        with self._request_lock:
            try:
                self._send(request, fds, answered=True)
                reply, frame = self._final_reply(what, wait_s, on_waiting)
                with frame:
                    if isinstance(reply, expected):
                        self._check_fds(reply, frame)
                        return reply, frame.take()
                if not isinstance(reply, Failure):
                    raise ProtocolError(f"{self._path}: `{what}` was answered by {type(reply).__name__}", path=self._path)
            except BaseException as error:
                # Whatever interrupted the exchange, the next reply would answer this request.
                self._close(f"the connection was closed after {type(error).__name__} in `{what}`")
                raise
        raise failures.from_failure(self._path, reply, what)

    def _final_reply(self, what: str, wait_s: float, on_waiting: Callable[[Waiting], None] | None) -> tuple[Reply, framing.Frame]:
        """Receive until something else than ``Waiting`` comes; the frame still owns its descriptors."""
        started_s = time.monotonic()
        silence_s = self._timeout_s
        while True:
            deadline_s = min(started_s + wait_s + self._timeout_s, time.monotonic() + silence_s)
            frame = self._receive(what, deadline_s)
            try:
                if frame.starved:
                    raise failures.no_files_left(self._path, needed=frame.announced)
                reply = framing.decode_reply(frame.payload)
            except ProtocolError as error:
                frame.close()
                raise ProtocolError(f"{self._path}: the answer to `{what}` is a {error}", path=self._path) from error
            except BaseException:
                frame.close()
                raise
            if not isinstance(reply, Waiting):
                return reply, frame
            frame.close()
            silence_s = max(self._timeout_s, _MIN_SILENCE_S)
            if on_waiting is not None:
                on_waiting(reply)

    def _send(self, request: Request, fds: Sequence[int] = (), *, answered: bool = False) -> None:
        try:
            with self._send_lock:
                self._check_open()
                framing.send(self._sock, framing.encode(request), fds, time.monotonic() + self._timeout_s)
        except WeightCacheError:
            raise
        except TimeoutError as error:
            self._close("a request could only be sent in part")
            raise failures.hung(self._path, "take a request", self._timeout_s) from error
        except OSError as error:
            self._check_open()
            if failures.is_file_limit(error):
                raise failures.no_files_left(self._path, needed=len(fds)) from error
            if answered and error.errno in (errno.EPIPE, errno.ECONNRESET):
                return  # a daemon that refuses a request may hang up before it has read all of it; its answer says why
            raise failures.gone(self._path, "a request was being sent") from error

    def _receive(self, what: str, deadline_s: float) -> framing.Frame:
        try:
            return framing.receive(self._sock, self._reader, deadline_s)
        except TimeoutError as error:
            raise failures.hung(self._path, f"answer `{what}`", self._timeout_s) from error
        except ProtocolVersionError as error:
            raise failures.wrong_version(self._path, getattr(error, "peer", None)) from error
        except ProtocolError as error:
            raise failures.not_a_daemon(self._path, error) from error
        except OSError as error:  # PeerClosed too
            self._check_open()
            raise failures.gone(self._path, f"it was to answer `{what}`") from error

    def _check_open(self) -> None:
        if self._closed_because is not None:
            raise DaemonUnavailable(f"{self._path}: {self._closed_because}", path=self._path)

    def _check_fds(self, reply: object, frame: framing.Frame) -> None:
        wanted = len(reply.segments) if isinstance(reply, Hit) else 0
        if len(frame.fds) != wanted:
            raise ProtocolError(
                f"{self._path}: {type(reply).__name__} came with {len(frame.fds)} file descriptors instead of {wanted}",
                path=self._path,
            )


def _connect(sock: socket.socket, path: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            sock.connect(path)
            return
        except BlockingIOError as error:
            # The backlog is full; for Unix sockets the kernel offers nothing to poll for.
            if time.monotonic() >= deadline_s:
                raise failures.hung(path, "accept a connection", timeout_s) from error
            select.select([], [], [], _CONNECT_RETRY_S)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise DaemonUnavailable(
                f"no daemon listens at {path} (a leftover of one that was killed): start one with `torchwcache daemon`", path=path
            ) from error
        except PermissionError as error:
            raise UntrustedSocketError(f"{path}: connecting is not permitted", path=path) from error
        except OSError as error:
            raise DaemonUnavailable(f"{path}: cannot connect to the daemon: {error.strerror}", path=path) from error
