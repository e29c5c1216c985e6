"""The daemon's place in the file system: a private folder, an exclusive lock, a listening socket."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat

from torchwcache.errors import DaemonAlreadyRunningError, UntrustedSocketError
from torchwcache.wire.address import check_path, make_folder, peer_credentials

__all__ = ["Endpoint", "lock_path", "log_path"]

_BACKLOG = 1024


def lock_path(path: str) -> str:
    """The lock file of a socket. It is never removed: two daemons could lock two files of one name."""
    return path + ".lock"


def log_path(path: str) -> str:
    """Where a daemon writes that was started by an engine."""
    return path + ".log"


class Endpoint:
    """Owns lock and socket from :meth:`open` to :meth:`close`.

    Args:
        path: The socket's path.

    Raises:
        ConfigError: The path is too long for a socket.
    """

    def __init__(self, path: str) -> None:
        self.path = check_path(path)
        self._undo = contextlib.ExitStack()
        self._listener: socket.socket | None = None
        self._identity: tuple[int, int] | None = None

    @property
    def listener(self) -> socket.socket:
        """The listening socket, non-blocking."""
        assert self._listener is not None
        return self._listener

    def open(self) -> None:
        """Take the lock, remove what a killed daemon left behind, and listen.

        Raises:
            DaemonAlreadyRunningError: Another daemon holds the lock, or answers at the socket.
            UntrustedSocketError: The folder, or something in it, is not this user's alone.
            OSError: The file system does not let us.
        """
        with contextlib.ExitStack() as undo:
            make_folder(os.path.dirname(self.path))
            undo.callback(os.close, _take_lock(self.path))
            undo.callback(os.close, _keep_from_cleaners(os.path.dirname(self.path)))
            _remove_stale(self.path)
            listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
            umask = os.umask(0o177)  # the socket is 0600 from its first moment, not from a chmod on
            try:
                listener.bind(self.path)
            finally:
                os.umask(umask)
            found = os.lstat(self.path)
            self._identity = (found.st_dev, found.st_ino)
            undo.callback(self._unlink)  # runs before the lock is given up
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            self._listener = listener
            self._undo = undo.pop_all()

    def is_intact(self) -> bool:
        """Whether clients that look at the path find this daemon: somebody may have removed the socket or its folder."""
        try:
            found = os.lstat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def close(self) -> None:
        """Remove the socket, stop listening, release the lock. Idempotent."""
        self._undo.close()
        self._listener = None

    def _unlink(self) -> None:
        if self.is_intact():
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def _take_lock(path: str) -> int:
    lock = lock_path(path)
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UntrustedSocketError(f"{lock} is a symbolic link: remove it", path=lock) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise UntrustedSocketError(f"{lock} is not a regular file of yours: remove it", path=lock)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _already_running(path, _pid_in(fd), f"holds the lock {lock}") from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _pid_in(fd: int) -> int:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else 0  # empty in the moment between its taking the lock and its writing the pid


def _already_running(path: str, pid: int, how: str) -> DaemonAlreadyRunningError:
    return DaemonAlreadyRunningError(
        f"a daemon runs already at {path}: process {pid or 'unknown'} {how}. Use it, stop it with `torchwcache stop`, or set"
        " TORCHWCACHE_SOCKET to another path",
        path=path,
        pid=pid,
    )


def _keep_from_cleaners(folder: str) -> int:
    """Hold a shared lock on the folder: systemd-tmpfiles leaves folders alone that somebody has locked (tmpfiles.d(5))."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks: nothing depends on it
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def _remove_stale(path: str) -> None:
    """Remove the socket of a dead daemon. Only the holder of the lock may do this.

    The lock alone would do if nobody ever removed lock files; so ask first whether somebody answers.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise UntrustedSocketError(f"{path} is in the way and is no socket: remove it", path=path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except BlockingIOError as error:  # its backlog is full: it lives
            raise _already_running(path, 0, "listens there") from error
        pid, _ = peer_credentials(probe)
    raise _already_running(path, pid, "listens there")
