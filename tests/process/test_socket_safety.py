"""A socket at a predictable path proves nothing (F16): what is not this user's alone is refused, on both sides."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from wire_helpers import TIMEOUT_S, answer, hung_up

from torchwcache.errors import ConfigError, DaemonUnavailable, UntrustedSocketError
from torchwcache.wire import address
from torchwcache.wire.client import DaemonConnection

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files that belong to others")


@contextlib.contextmanager
def listening(path, mode=0o600):
    """A socket that would answer, if somebody connected."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        os.chmod(path, mode)
        listener.listen(5)
        listener.settimeout(0.05)
        yield listener


def refuses(path, says):
    """The client refuses, and says about which path, why, and what to do."""
    with pytest.raises(UntrustedSocketError, match=says) as caught:
        DaemonConnection.connect(str(path), timeout_s=1)
    assert caught.value.path in str(caught.value)
    assert caught.value.path in (str(path), os.path.dirname(path))
    assert "TORCHWCACHE_SOCKET" in str(caught.value)


def nobody_connected(listener):
    with pytest.raises(TimeoutError):
        listener.accept()


def serve(path):
    """Try to start a daemon; returns its exit status and what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "torchwcache.daemon", "--socket", str(path), "--foreground"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return done.returncode, done.stderr


def test_the_checks_let_a_good_place_pass(socket_folder):
    with listening(socket_folder / "s"), DaemonConnection.connect(str(socket_folder / "s")) as connection:
        assert connection.is_alive()


# ---- the folder --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o750, 0o755, 0o770, 0o777, 0o1777])
def test_a_folder_that_is_open_to_others(socket_folder, mode):
    with listening(socket_folder / "s") as listener:
        socket_folder.chmod(mode)
        refuses(socket_folder / "s", "mode .* is open to others.*chmod 0700")
        nobody_connected(listener)


def test_a_folder_that_is_a_symbolic_link(socket_folder):
    real = socket_folder / "real"
    real.mkdir(0o700)
    (socket_folder / "link").symlink_to(real)
    with listening(real / "s") as listener:
        refuses(socket_folder / "link" / "s", "is a symbolic link")
        nobody_connected(listener)


def test_a_folder_that_is_a_file(socket_folder):
    (socket_folder / "file").write_text("")
    refuses(socket_folder / "file" / "s", "is not a folder")


@needs_root
def test_a_folder_of_somebody_else(socket_folder):
    folder = socket_folder / "theirs"
    folder.mkdir(0o700)
    with listening(folder / "s") as listener:
        os.chown(folder, NOBODY, NOBODY)
        refuses(folder / "s", f"belongs to uid {NOBODY}")
        nobody_connected(listener)


def test_a_folder_that_is_not_there(socket_folder):
    with pytest.raises(DaemonUnavailable, match=r"does not exist.*torchwcache daemon"):
        DaemonConnection.connect(str(socket_folder / "missing" / "s"))


# ---- the socket --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o601, 0o606, 0o660, 0o666, 0o777])
def test_a_socket_that_is_open_to_others(socket_folder, mode):
    with listening(socket_folder / "s", mode) as listener:
        refuses(socket_folder / "s", "mode .* is open to others")
        nobody_connected(listener)


def test_a_socket_that_is_a_symbolic_link(socket_folder):
    with listening(socket_folder / "real") as listener:
        (socket_folder / "s").symlink_to(socket_folder / "real")
        refuses(socket_folder / "s", "is a symbolic link")
        nobody_connected(listener)


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, os.mkfifo])
def test_a_socket_that_is_none(socket_folder, make):
    make(socket_folder / "s")
    refuses(socket_folder / "s", "is no socket")


@needs_root
def test_a_socket_of_somebody_else(socket_folder):
    with listening(socket_folder / "s") as listener:
        os.chown(socket_folder / "s", NOBODY, NOBODY)
        refuses(socket_folder / "s", f"belongs to uid {NOBODY}")
        nobody_connected(listener)


def test_a_socket_that_is_not_there(socket_folder):
    with pytest.raises(DaemonUnavailable, match=r"does not exist.*torchwcache daemon") as caught:
        DaemonConnection.connect(str(socket_folder / "s"))
    assert str(socket_folder / "s") in str(caught.value)


def test_a_socket_of_another_kind(socket_folder):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(socket_folder / "s"))
        os.chmod(socket_folder / "s", 0o600)
        with pytest.raises(DaemonUnavailable, match="cannot connect"):
            DaemonConnection.connect(str(socket_folder / "s"))


def test_a_path_that_is_too_long(socket_folder, private_socket):
    fits = str(socket_folder / "x") + "y" * (107 - len(str(socket_folder / "x")))
    assert len(fits) == 107
    with listening(fits), DaemonConnection.connect(fits):
        pass
    with pytest.raises(ConfigError, match="has 108 bytes, and Linux allows at most 107: set TORCHWCACHE_SOCKET"):
        DaemonConnection.connect(fits + "z")
    with pytest.raises(ConfigError, match="107"):
        DaemonConnection.connect("/tmp/" + "ü" * 60)  # bytes count, not characters
    status, said = serve(fits + "z")
    assert status == 1
    assert "107" in said


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_path_that_is_none(path):
    with pytest.raises(ConfigError, match="TORCHWCACHE_SOCKET"):
        DaemonConnection.connect(path)


# ---- the peer ----------------------------------------------------------------------------------------------------------------

AS_NOBODY = (
    "import os, socket, sys\nsock = socket.socket(fileno=int(sys.argv[1]))\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
)


@needs_root
def test_a_process_of_somebody_else_behind_our_own_socket(socket_folder):
    """It took the listening socket over: folder and file are ours, the process is not."""
    path = socket_folder / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        os.chmod(path, 0o600)
        code = AS_NOBODY + "sock.listen(5); print('ready', flush=True); sys.stdin.readline()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[listener.fileno()],
        )
        try:
            assert process.stdout.readline() == "ready\n"
            refuses(path, f"is served by process {process.pid} of uid {NOBODY}")
        finally:
            process.communicate("\n", timeout=TIMEOUT_S)


@needs_root
def test_a_client_of_somebody_else_is_turned_away(daemon):
    """It would have to be let into the folder first; the daemon does not rely on that."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        code = AS_NOBODY + "sock.connect('daemon.sock'); print('connected', flush=True); sys.stdin.readline()"
        folder = Path(daemon.socket).parent
        folder.chmod(0o755)
        Path(daemon.socket).chmod(0o666)
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(sock.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            pass_fds=[sock.fileno()],
        )
        try:
            assert process.stdout.readline() == "connected\n"
            failure = answer(sock)
            assert failure.code == "forbidden"
            assert f"uid {NOBODY} is not served" in failure.message
            assert hung_up(sock)
        finally:
            process.communicate("\n", timeout=TIMEOUT_S)
    folder.chmod(0o700)
    Path(daemon.socket).chmod(0o600)
    with daemon.connect() as connection:
        assert connection.status().pid == daemon.pid


def test_a_peer_of_another_uid_is_refused_by_what_the_kernel_says(socket_folder, monkeypatch):
    """The same without root: the kernel's answer is the only thing that differs."""
    monkeypatch.setattr(address, "peer_credentials", lambda sock: (1, os.geteuid() + 1))
    with listening(socket_folder / "s"):
        refuses(socket_folder / "s", "is served by process 1 of uid")


# ---- the daemon's side -------------------------------------------------------------------------------------------------------


def test_what_a_daemon_makes_is_private(daemon):
    folder = Path(daemon.socket).parent
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(daemon.socket).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(daemon.socket + ".lock").st_mode) == 0o600


def test_the_socket_is_private_from_its_first_moment(socket_folder):
    """Under a umask that lets everything through, and without a chmod that would come too late."""
    code = (
        "import os, sys\n"
        "os.umask(0)\n"
        "def forbidden(*args, **kwargs): raise SystemExit('chmod was called')\n"
        "os.chmod = os.fchmod = forbidden\n"
        "from torchwcache.daemon.endpoint import Endpoint\n"
        "endpoint = Endpoint(sys.argv[1])\n"
        "endpoint.open()\n"
        "modes = [os.stat(place).st_mode & 0o777 for place in (sys.argv[1], os.path.dirname(sys.argv[1]))]\n"
        "print(*map(oct, modes), oct(os.umask(0)))\n"
        "endpoint.close()\n"
        "endpoint.close()\n"
    )
    command = [sys.executable, "-c", code, str(socket_folder / "new" / "s")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert done.stdout.split() == ["0o600", "0o700", "0o0"]


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
def test_a_daemon_does_not_serve_in_an_open_folder(socket_folder, mode):
    socket_folder.chmod(mode)
    status, said = serve(socket_folder / "s")
    assert status == 1
    assert "is open to others" in said
    assert stat.S_IMODE(os.stat(socket_folder).st_mode) == mode  # it is not the daemon's to change
    assert not (socket_folder / "s").exists()


def test_a_daemon_does_not_serve_behind_a_symbolic_link(socket_folder):
    (socket_folder / "real").mkdir(0o700)
    (socket_folder / "link").symlink_to(socket_folder / "real")
    status, said = serve(socket_folder / "link" / "s")
    assert status == 1
    assert "is a symbolic link" in said
    assert not list((socket_folder / "real").iterdir())


@needs_root
def test_a_daemon_does_not_serve_in_the_folder_of_somebody_else(socket_folder):
    os.chown(socket_folder, NOBODY, NOBODY)
    status, said = serve(socket_folder / "s")
    assert status == 1
    assert f"belongs to uid {NOBODY}" in said
    os.chown(socket_folder, 0, 0)


@pytest.mark.parametrize("suffix", [".lock", ".log", ""])
def test_a_daemon_follows_no_planted_link(socket_folder, suffix):
    from torchwcache.daemon.supervisor import start_daemon

    victim = socket_folder / "victim"
    victim.write_text("precious")
    path = str(socket_folder / "s")
    os.symlink(victim, path + suffix)
    with pytest.raises((UntrustedSocketError, DaemonUnavailable)) as caught:
        start_daemon(path, timeout_s=TIMEOUT_S)
    assert path + suffix in str(caught.value)
    assert victim.read_text() == "precious"


def test_a_daemon_removes_nothing_but_sockets(socket_folder):
    path = socket_folder / "s"
    path.write_text("precious")
    status, said = serve(path)
    assert status == 1
    assert "is no socket: remove it" in said
    assert path.read_text() == "precious"


def test_a_daemon_leaves_the_socket_alone_that_somebody_else_serves(socket_folder):
    """Without a lock file there is still somebody who answers."""
    path = socket_folder / "s"
    with listening(path):
        status, said = serve(path)
        assert status == 1
        assert f"process {os.getpid()} listens there" in said
        assert path.is_socket()


def test_the_end_of_a_daemon_does_not_remove_the_socket_of_its_successor(daemon, daemon_class):
    """Somebody removed lock and socket, and a second daemon took the place: the first one's exit must not take it away."""
    daemon.process.send_signal(signal.SIGSTOP)  # else it might notice, and take its place again
    for suffix in ("", ".lock"):
        os.unlink(daemon.socket + suffix)
    second = daemon_class(daemon.socket)
    try:
        with second.wait_ready().connect() as connection:
            assert connection.status().pid == second.pid
        daemon.end()
        with second.connect() as connection:
            assert connection.status().pid == second.pid
    finally:
        second.end()


# ---- where it is -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({}, f"/tmp/torchwcache-{os.geteuid()}/daemon.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/1", "TMPDIR": "/var/tmp"}, f"/tmp/torchwcache-{os.geteuid()}/daemon.sock"),
        ({"TORCHWCACHE_SOCKET": ""}, f"/tmp/torchwcache-{os.geteuid()}/daemon.sock"),
        ({"TORCHWCACHE_SOCKET": "/run/x/s"}, "/run/x/s"),
        ({"TORCHWCACHE_SOCKET": "s"}, os.path.join(os.getcwd(), "s")),
    ],
)
def test_the_default_place(environ, path):
    assert address.default_socket_path(environ) == path


def test_eight_threads_may_check_at_once(daemon):
    errors = []

    def connect():
        try:
            with daemon.connect() as connection:
                connection.status()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=connect) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert errors == []
