"""Where the daemon's socket is, and whether it may be trusted. Imports no torch.

Every local user can create names in ``/tmp``, so a socket at a predictable path proves nothing. Both sides therefore insist on a
folder that only this user can enter, a socket that is really one and is this user's own, and a peer with the same uid; whatever
cannot be established is refused.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Mapping

from torchwcache.errors import ConfigError, DaemonUnavailable, UntrustedSocketError

__all__ = [
    "MAX_PATH_NBYTES",
    "SOCKET_VARIABLE",
    "check_folder",
    "check_path",
    "check_peer",
    "check_socket",
    "default_socket_path",
    "make_folder",
    "peer_credentials",
]

SOCKET_VARIABLE = "TORCHWCACHE_SOCKET"
MAX_PATH_NBYTES = 107
"""``sun_path`` of a Unix socket has 108 bytes, the last of which is NUL."""

_UCRED = struct.Struct("iII")


def default_socket_path(environ: Mapping[str, str]) -> str:
    """``TORCHWCACHE_SOCKET``, else one fixed place for this user.

    Neither ``XDG_RUNTIME_DIR`` nor ``TMPDIR`` is asked: they differ between a login, a service and a container of the same user,
    and then each would find a daemon of its own.
    """
    path = environ.get(SOCKET_VARIABLE) or f"/tmp/torchwcache-{os.geteuid()}/daemon.sock"
    return os.path.abspath(os.path.expanduser(path))


def check_path(path: str) -> str:
    """Return the absolute path.

    Raises:
        ConfigError: It is too long for a Unix socket, or not a path.
    """
    if not path or "\0" in path:
        raise ConfigError(f"{path!r} is not the path of a socket; set {SOCKET_VARIABLE} to one", path=path)
    absolute = os.path.abspath(path)
    if (nbytes := len(os.fsencode(absolute))) > MAX_PATH_NBYTES:
        raise ConfigError(
            f"socket path {absolute} has {nbytes} bytes, and Linux allows at most {MAX_PATH_NBYTES}: set {SOCKET_VARIABLE} to a"
            " shorter path",
            path=absolute,
        )
    return absolute


def _untrusted(path: str, why: str, remedy: str) -> UntrustedSocketError:
    return UntrustedSocketError(f"{path} {why}, so whatever answers there is not trusted: {remedy}", path=path)


def check_folder(folder: str) -> None:
    """Make sure that nobody but this user can put anything into the socket's folder.

    Raises:
        FileNotFoundError: There is no such folder.
        UntrustedSocketError: It is a symbolic link or no folder, belongs to somebody else, or is open to others.
    """
    remedy = f"set {SOCKET_VARIABLE} to a socket in a folder of mode 0700 that you own"
    found = os.lstat(folder)
    if stat.S_ISLNK(found.st_mode):
        raise _untrusted(folder, "is a symbolic link", remedy)
    if not stat.S_ISDIR(found.st_mode):
        raise _untrusted(folder, "is not a folder", remedy)
    if found.st_uid != os.geteuid():
        raise _untrusted(folder, f"belongs to uid {found.st_uid}, not to you (uid {os.geteuid()})", remedy)
    if found.st_mode & 0o077:
        raise _untrusted(folder, f"has mode {stat.S_IMODE(found.st_mode):04o} and is open to others", f"chmod 0700 it, or {remedy}")


def make_folder(folder: str) -> None:
    """Create the folder with mode 0700 if it is missing, and check it in any case.

    Raises:
        UntrustedSocketError: As :func:`check_folder`.
        OSError: It cannot be created.
    """
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with contextlib.suppress(FileExistsError):  # ours from before, or planted by somebody else: the check tells them apart
        os.mkdir(folder, 0o700)
    check_folder(folder)


def check_socket(path: str) -> None:
    """Check folder and socket before connecting.

    Raises:
        DaemonUnavailable: There is nothing.
        UntrustedSocketError: There is something that is not ours.
    """
    try:
        check_folder(os.path.dirname(path))
        found = os.lstat(path)
    except UntrustedSocketError:
        raise
    except PermissionError as error:
        raise _untrusted(path, "cannot be looked at (permission denied)", f"set {SOCKET_VARIABLE} to another") from error
    except OSError as error:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        raise DaemonUnavailable(
            f"no daemon: {error.filename} {'does not exist' if missing else f'cannot be used ({error.strerror})'}. Start one with"
            f" `torchwcache daemon`, or set {SOCKET_VARIABLE} to the socket of one that runs",
            path=path,
        ) from error
    remedy = f"remove it, or set {SOCKET_VARIABLE} to another path"
    if not stat.S_ISSOCK(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no socket"
        raise _untrusted(path, f"is {kind}", remedy)
    if found.st_uid != os.geteuid():
        raise _untrusted(path, f"belongs to uid {found.st_uid}, not to you (uid {os.geteuid()})", remedy)
    if found.st_mode & 0o077:
        raise _untrusted(path, f"has mode {stat.S_IMODE(found.st_mode):04o} and is open to others", remedy)


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """``(pid, uid)`` of the other end, from the kernel. The pid is for messages only: it may be of another namespace."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def check_peer(sock: socket.socket, path: str) -> None:
    """Make sure that the process that listens is this user's.

    Raises:
        UntrustedSocketError: It is not.
    """
    pid, uid = peer_credentials(sock)
    if uid != os.geteuid():
        raise _untrusted(
            path,
            f"is served by process {pid} of uid {uid}, not by you (uid {os.geteuid()})",
            f"stop it, or set {SOCKET_VARIABLE} to another path",
        )
