from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from torchwcache.errors import DaemonUnavailable
from torchwcache.wire.client import DaemonConnection

TIMEOUT_S = 20.0

with contextlib.suppress(ImportError):  # the engines' environments lack it
    from hypothesis import HealthCheck, settings

    # How long an example takes is the machine's business: no test asserts a time.
    settings.register_profile("no times", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("no times")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-architectures", action="store_true", help="write docs/architectures.md from what comes out")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked ``gpu`` is skipped where there is none, unless ``TORCHWCACHE_REQUIRE_CUDA=1`` says that there must be one."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        if os.environ.get("TORCHWCACHE_REQUIRE_CUDA") == "1":
            pytest.fail("TORCHWCACHE_REQUIRE_CUDA=1, and torch sees no CUDA device", pytrace=False)
        pytest.skip("needs a CUDA device")


def wait_until(condition: Callable[[], object], *, what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Poll until ``condition`` holds; fail the test when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.005)


def end_daemon(socket_path: str) -> None:
    """End whatever daemon serves this socket, or is about to: a test's own, since its folder is."""
    if not os.path.exists(socket_path + ".lock"):
        return
    mine = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.ppid() != os.getpid() and socket_path in process.cmdline():
                mine.append(process)
    for process in mine:
        with contextlib.suppress(psutil.Error):
            process.resume()
            process.terminate()
    _, left = psutil.wait_procs(mine, timeout=5)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=5)


class RunningDaemon:
    """A real daemon in a process of its own.

    Attributes:
        socket: Path of its socket.
        process: The process, a child of the test.
    """

    def __init__(self, socket_path: str, command: list[str] | None = None) -> None:
        self.socket = socket_path
        self._log = open(socket_path + ".test.log", "a+b")  # noqa: SIM115 - closed in end()
        self.process = subprocess.Popen(
            command or [sys.executable, "-m", "torchwcache.daemon", "--socket", socket_path, "--foreground"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return Path(self.socket + ".test.log").read_text()

    def wait_ready(self) -> RunningDaemon:
        def ready() -> bool:
            if self.process.poll() is not None:
                pytest.fail(f"the daemon exited with {self.process.returncode}:\n{self.log}")
            try:
                DaemonConnection.connect(self.socket).close()
            except DaemonUnavailable:
                return False
            return True

        wait_until(ready, what="the daemon accepts connections")
        return self

    def connect(self, *, timeout_s: float = TIMEOUT_S) -> DaemonConnection:
        return DaemonConnection.connect(self.socket, timeout_s=timeout_s)

    def kill(self) -> None:
        """End it with SIGKILL: nothing is cleaned up."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(TIMEOUT_S)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.kill()
        self._log.close()


@pytest.fixture(name="wait_until")
def _wait_until() -> Callable[..., None]:
    """:func:`wait_until`, for tests that cannot import this file."""
    return wait_until


@pytest.fixture
def open_fds() -> Callable[[], frozenset[tuple[int, str]]]:
    """What is open in this process: number and target of every descriptor."""

    def look() -> frozenset[tuple[int, str]]:
        found = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the one that lists
                found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        return frozenset(found)

    return look


@pytest.fixture
def make_memfd() -> Iterator[Callable[..., int]]:
    """Makes memfds as a producer would commit them: sealed, unless told which seals to put on."""
    made: list[int] = []
    everything = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

    def make(content: bytes = b"weights", *, nbytes: int = 4096, seals: int = everything) -> int:
        fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        made.append(fd)
        os.ftruncate(fd, nbytes)
        os.pwrite(fd, content, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd

    yield make
    for fd in made:
        with contextlib.suppress(OSError):
            os.close(fd)


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A private folder whose path is short enough for sockets, which pytest's own is not always."""
    folder = Path(tempfile.mkdtemp(prefix="twc-", dir="/tmp"))
    yield folder
    for path in folder.rglob("daemon.sock"):  # also those of commands that were killed, such as a demo that took too long
        end_daemon(str(path))
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def private_socket(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Keep every test away from the user's own daemon, and end whatever daemon it started by itself."""
    path = str(socket_folder / "daemon.sock")
    monkeypatch.setenv("TORCHWCACHE_SOCKET", path)
    yield path
    end_daemon(path)


@pytest.fixture
def daemon_class() -> type[RunningDaemon]:
    """For tests that need a daemon of another kind, or a second one."""
    return RunningDaemon


@pytest.fixture
def start(private_socket: str) -> Iterator[Callable[[Callable[[str], list[str]]], RunningDaemon]]:
    """Starts a daemon by another command, which is made from the socket's path."""
    with contextlib.ExitStack() as stack:

        def make(command: Callable[[str], list[str]]) -> RunningDaemon:
            running = RunningDaemon(private_socket, command(private_socket))
            stack.callback(running.end)
            return running.wait_ready()

        yield make


@pytest.fixture
def daemon(private_socket: str) -> Iterator[RunningDaemon]:
    """A running daemon at the socket that this test's code finds by default."""
    running = RunningDaemon(private_socket)
    try:
        yield running.wait_ready()
    finally:
        running.end()
