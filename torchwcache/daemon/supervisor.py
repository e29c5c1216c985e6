"""Finding the daemon, and starting one that outlives whoever starts it. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping

import msgspec

import torchwcache
from torchwcache import errors
from torchwcache.daemon.endpoint import log_path
from torchwcache.daemon.lifetime import shared_lifetime
from torchwcache.errors import (
    ConfigError,
    DaemonAlreadyRunningError,
    DaemonTimeoutError,
    DaemonUnavailable,
    UntrustedSocketError,
    WeightCacheError,
)
from torchwcache.wire.address import check_path, default_socket_path, make_folder
from torchwcache.wire.client import DaemonConnection
from torchwcache.wire.failures import is_file_limit, no_files_left

__all__ = ["connect_or_start", "default_socket_path", "start_daemon"]

_log = logging.getLogger(__name__)

_MAX_LOG_NBYTES = 2**20
_RETRY_S = 0.02
_LOCKED_RETRY_S = 0.1
_LAST_LINES_NBYTES = 2000


def connect_or_start(path: str, *, start: bool, timeout_s: float = 10.0) -> DaemonConnection:
    """Connect to the daemon; with ``start``, start one when none runs.

    However many processes do this at once, one daemon results and all of them connect to it.

    Args:
        path: The socket.
        start: Whether to start a daemon (mode ``daemon``) or not (mode ``client``).
        timeout_s: Bound for all of it, and for every answer of the daemon from then on.

    Raises:
        DaemonUnavailable: No daemon runs, and ``start`` is false, or the daemon did not come up; the message has its last words.
        DaemonTimeoutError: It did not come up in time.
        DaemonError: As :meth:`DaemonConnection.connect`.
        ConfigError: The path is too long.
    """
    path = check_path(path)
    deadline_s = time.monotonic() + timeout_s
    held: DaemonAlreadyRunningError | None = None
    while True:
        try:
            return DaemonConnection.connect(path, timeout_s=timeout_s)
        except DaemonUnavailable:
            if not start:
                raise
        with _no_raw_errors(path), _start_lock(path, patience_s=(deadline_s - time.monotonic()) / 2):
            with contextlib.suppress(DaemonUnavailable):  # whoever had the lock before us may have started it
                return DaemonConnection.connect(path, timeout_s=timeout_s)
            try:
                start_daemon(path, timeout_s=max(deadline_s - time.monotonic(), _RETRY_S))
                continue
            except DaemonAlreadyRunningError as error:  # one that starts or exits at this moment: look again
                held = error
            except DaemonTimeoutError:
                if held is None:
                    raise
        if time.monotonic() + _LOCKED_RETRY_S >= deadline_s:
            raise DaemonTimeoutError(
                f"no daemon answers at {path}, although one holds its lock (for {timeout_s:g} s now): {held}", path=path
            ) from held
        time.sleep(_LOCKED_RETRY_S)


def start_daemon(path: str, *, timeout_s: float = 10.0, idle_timeout_s: float | None = None) -> None:
    """Start a daemon in the background and wait until it can be connected to.

    It is in a session of its own, a child of init, at home in ``/``, with no descriptor of ours, and writes to a log beside its
    socket: the end of this process, of its terminal, process group or process tree does not reach it. The end of its container or
    systemd unit does, of which a warning tells.

    Args:
        path: The socket.
        timeout_s: How long to wait.
        idle_timeout_s: Let it exit after so many seconds without a client.

    Raises:
        DaemonAlreadyRunningError: One runs there.
        UntrustedSocketError: The folder is not this user's alone.
        DaemonUnavailable: It failed to start; the message has its last words.
        DaemonTimeoutError: It was not ready in time.
    """
    path = check_path(path)
    deadline_s = time.monotonic() + timeout_s
    with _no_raw_errors(path), contextlib.ExitStack() as stack:
        make_folder(os.path.dirname(path))
        ready, told = os.pipe2(os.O_CLOEXEC)
        stack.callback(os.close, ready)
        with contextlib.ExitStack() as theirs:
            theirs.callback(os.close, told)
            log = _open_log(path)
            theirs.callback(os.close, log)
            process = _spawn(path, log, told, idle_timeout_s)
        stack.callback(_reap, process)
        report = _read_report(ready, deadline_s)
    if report is None:
        raise DaemonTimeoutError(
            f"the daemon for {path} was not ready within {timeout_s:g} s: {_last_words(path)}", path=path, log=log_path(path)
        )
    _raise_report(report, path)
    _log.info("started a daemon at %s", path)
    for warning in shared_lifetime():
        _log.warning("%s", warning)


def _spawn(path: str, log: int, told: int, idle_timeout_s: float | None) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise DaemonUnavailable(
            "this Python does not know its interpreter (sys.executable), so it cannot start a daemon", path=path
        )
    # -P: its working directory is no place to import from.
    command = [sys.executable, "-P", "-m", "torchwcache.daemon", "--socket", path, "--ready-fd", str(told)]
    if idle_timeout_s is not None:
        command += ["--idle-timeout", str(idle_timeout_s)]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd="/",
        env=child_environment(os.environ),
        start_new_session=True,
        pass_fds=(told,),
    )


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Ours, with a ``PYTHONPATH`` that has what this process imports from elsewhere than its interpreter's own places.

    Those places are not repeated: in ``PYTHONPATH`` they would come before the standard library.
    """
    own = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    found = [os.path.dirname(os.path.dirname(os.path.abspath(str(package.__file__)))) for package in (torchwcache, msgspec)]
    given = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    paths = [os.path.abspath(entry) for entry in given] + [entry for entry in found if os.path.realpath(entry) not in own]
    result = dict(environ)
    if paths:
        result["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return result


def _open_log(path: str) -> int:
    log = log_path(path)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(fd)
        raise UntrustedSocketError(f"{log} is not a regular file of yours: remove it", path=log)
    if found.st_size > _MAX_LOG_NBYTES:
        os.ftruncate(fd, 0)
    return fd


def _read_report(ready: int, deadline_s: float) -> bytes | None:
    """What the daemon says about its start; ``None`` when it says nothing in time."""
    report = b""
    poll = select.poll()
    poll.register(ready, select.POLLIN)
    while (remaining_s := deadline_s - time.monotonic()) > 0:
        if not poll.poll(remaining_s * 1000):
            continue
        piece = os.read(ready, 65536)
        report += piece
        if not piece or report == b"ready\n":
            return report
    return None


def _raise_report(report: bytes, path: str) -> None:
    if report == b"ready\n":
        return
    kind, _, rest = report.decode(errors="replace").partition("\n")
    pid, _, message = rest.partition("\n")
    if kind == "DaemonAlreadyRunningError":
        raise DaemonAlreadyRunningError(message, path=path, pid=int(pid) if pid.isdigit() else 0)
    if kind in ("ConfigError", "UntrustedSocketError"):
        cls: type[ConfigError | UntrustedSocketError] = getattr(errors, kind)
        raise cls(message, path=path)
    raise DaemonUnavailable(f"the daemon for {path} did not start: {message or _last_words(path)}", path=path, log=log_path(path))


def _last_words(path: str) -> str:
    log = log_path(path)
    try:
        with open(log, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _LAST_LINES_NBYTES, 0))
            text = file.read().decode(errors="replace").strip()
    except OSError:
        text = ""
    return f"see {log}" + (f", which ends with:\n{text}" if text else "")


def _reap(process: subprocess.Popen[bytes]) -> None:
    """The process that we started has handed over to a child of its own and exits; if it hangs, so does the start."""
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _no_raw_errors(path: str) -> Iterator[None]:
    """Whatever the system refuses (a read-only file system, no room for a process) means: no daemon here."""
    try:
        yield
    except WeightCacheError:
        raise
    except OSError as error:
        if is_file_limit(error):
            raise no_files_left(path) from error
        raise DaemonUnavailable(
            f"cannot start a daemon for {path}: {error.strerror or error}"
            + (f" ({error.filename})" if error.filename else "")
            + "; set TORCHWCACHE_SOCKET to a place where you may write",
            path=path,
        ) from error


@contextlib.contextmanager
def _start_lock(path: str, *, patience_s: float) -> Iterator[None]:
    """Let one process at a time start a daemon. Only saves work: the daemon's own lock decides.

    So a lock that cannot be had in time, since its holder hangs or was forked while it held it, stops nobody.
    """
    make_folder(os.path.dirname(path))
    fd = os.open(path + ".start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        give_up_s = time.monotonic() + patience_s
        while time.monotonic() < give_up_s:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_RETRY_S)
        yield
    finally:
        os.close(fd)
