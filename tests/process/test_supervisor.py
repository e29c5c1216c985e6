"""Starting a daemon that outlives whoever starts it, once, however many try."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from wire_helpers import FAMILY, K1, TIMEOUT_S, child, entry, line_of

from torchwcache.daemon import supervisor
from torchwcache.daemon.lifetime import shared_lifetime
from torchwcache.daemon.supervisor import connect_or_start, default_socket_path, start_daemon
from torchwcache.errors import (
    ConfigError,
    DaemonAlreadyRunningError,
    DaemonTimeoutError,
    DaemonUnavailable,
    FileLimitError,
    UntrustedSocketError,
)
from torchwcache.wire import framing
from torchwcache.wire.client import DaemonConnection
from torchwcache.wire.messages import Attach, Hit

STARTER = (
    "import os, signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # under nohup, tests inherit that it is ignored
    "from torchwcache.daemon.supervisor import connect_or_start\n"
    "connection = connect_or_start(sys.argv[1], start=True, timeout_s=20)\n"
    "print(connection.status().pid, flush=True)\n"
)


def pid_at(path):
    with DaemonConnection.connect(path, timeout_s=TIMEOUT_S) as connection:
        return connection.status().pid


# ---- connect or start --------------------------------------------------------------------------------------------------------


def test_it_connects_to_the_one_that_runs(daemon):
    with connect_or_start(daemon.socket, start=True) as connection:
        assert connection.status().pid == daemon.pid


def test_it_does_not_start_one_unasked(private_socket):
    with pytest.raises(DaemonUnavailable, match=r"does not exist.*torchwcache daemon"):
        connect_or_start(private_socket, start=False)
    assert not Path(private_socket).exists()


def test_it_starts_one_and_finds_it_again(private_socket):
    assert default_socket_path(os.environ) == private_socket
    with connect_or_start(private_socket, start=True, timeout_s=TIMEOUT_S) as connection:
        pid = connection.status().pid
    with connect_or_start(private_socket, start=True, timeout_s=TIMEOUT_S) as connection:
        assert connection.status().pid == pid


def test_it_replaces_one_that_was_killed(daemon):
    daemon.kill()
    with connect_or_start(daemon.socket, start=True, timeout_s=TIMEOUT_S) as connection:
        assert connection.status().pid != daemon.pid


def test_it_makes_the_folder(socket_folder):
    path = str(socket_folder / "a" / "b" / "s")
    with connect_or_start(path, start=True, timeout_s=TIMEOUT_S) as connection:
        connection.stop()
    assert os.stat(socket_folder / "a" / "b").st_mode & 0o777 == 0o700


def test_eight_processes_at_once_end_up_with_one_daemon(private_socket):
    code = STARTER + "sys.stdin.readline()\n"
    with contextlib.ExitStack() as stack:
        starters = [stack.enter_context(child(code, private_socket)) for _ in range(8)]
        pids = {line_of(starter) for starter in starters}
        assert len(pids) == 1
        assert pids != {""}
    serving = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if private_socket in (process.info["cmdline"] or []) and "torchwcache.daemon" in (process.info["cmdline"] or [])
    ]
    assert serving == [int(pid) for pid in pids]


def test_the_race_is_decided_by_the_daemons_own_lock(private_socket, monkeypatch):
    """Without the lock that saves work there is still one daemon."""
    monkeypatch.setattr(supervisor, "_start_lock", lambda path, patience_s: contextlib.nullcontext())
    pids, errors = [], []

    def start():
        try:
            with connect_or_start(private_socket, start=True, timeout_s=TIMEOUT_S) as connection:
                pids.append(connection.status().pid)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert errors == []
    assert len(pids) == 4
    assert len(set(pids)) == 1


def test_somebody_who_hangs_with_the_start_lock_stops_nobody(private_socket):
    fd = os.open(private_socket + ".start", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with connect_or_start(private_socket, start=True, timeout_s=4.0) as connection:
            assert connection.status().pid
    finally:
        os.close(fd)


def test_one_that_is_just_starting_or_exiting_is_waited_for(private_socket):
    """It holds the lock and does not listen: neither absent nor there."""
    fd = os.open(private_socket + ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    release = threading.Timer(0.5, os.close, [fd])
    release.start()
    with connect_or_start(private_socket, start=True, timeout_s=TIMEOUT_S) as connection:
        assert connection.status().pid
    release.join()


def test_one_that_holds_the_lock_and_never_listens_is_a_timeout(private_socket):
    fd = os.open(private_socket + ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(DaemonTimeoutError, match="although one holds its lock"):
            connect_or_start(private_socket, start=True, timeout_s=1.0)
    finally:
        os.close(fd)


def test_a_daemon_that_exits_is_followed_by_another(private_socket):
    pids = set()
    for _ in range(3):
        with connect_or_start(private_socket, start=True, timeout_s=TIMEOUT_S) as connection:
            pids.add(connection.status().pid)
            connection.stop()
    assert len(pids) == 3


# ---- a start that fails ------------------------------------------------------------------------------------------------------


def test_a_second_start_says_who_is_there(daemon):
    with pytest.raises(DaemonAlreadyRunningError, match=f"process {daemon.pid} holds the lock") as caught:
        start_daemon(daemon.socket, timeout_s=TIMEOUT_S)
    assert caught.value.pid == daemon.pid


def test_the_reason_is_relayed(socket_folder):
    path = str(socket_folder / "s")
    Path(path).write_text("in the way")
    with pytest.raises(UntrustedSocketError, match="is in the way and is no socket"):
        start_daemon(path, timeout_s=TIMEOUT_S)


def test_an_open_folder_is_refused_before_anything_is_started(socket_folder):
    socket_folder.chmod(0o755)
    with pytest.raises(UntrustedSocketError, match="open to others"):
        connect_or_start(str(socket_folder / "s"), start=True)
    assert not list(socket_folder.iterdir())


def test_a_path_that_is_too_long(socket_folder):
    with pytest.raises(ConfigError, match="107"):
        connect_or_start(str(socket_folder / ("x" * 120)), start=True)


def test_the_last_words_of_a_daemon_that_cannot_even_start_are_shown(private_socket, monkeypatch, tmp_path):
    broken = tmp_path / "msgspec.py"
    broken.write_text("raise ImportError('msgspec is broken here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DaemonUnavailable, match="msgspec is broken here") as caught:
        start_daemon(private_socket, timeout_s=TIMEOUT_S)
    assert caught.value.log in str(caught.value)


def test_a_start_that_takes_too_long_is_a_timeout_and_leaves_no_process(private_socket, monkeypatch, tmp_path, wait_until):
    slow = tmp_path / "msgspec.py"
    slow.write_text("import time; time.sleep(3600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DaemonTimeoutError, match=r"not ready within 0\.5 s"):
        start_daemon(private_socket, timeout_s=0.5)
    assert not [p for p in psutil.Process().children() if private_socket in p.cmdline()]


def test_a_daemon_whose_starter_has_given_up_does_not_stay(private_socket, wait_until):
    ready, told = os.pipe()
    os.close(ready)
    log = Path(private_socket + ".log")
    command = [sys.executable, "-m", "torchwcache.daemon", "--socket", private_socket, "--ready-fd", str(told)]
    with log.open("w") as file:
        subprocess.run(command, pass_fds=[told], stdout=file, stderr=file, timeout=TIMEOUT_S, check=True)
    os.close(told)
    wait_until(lambda: "has given up on it, exiting" in log.read_text(), what="the daemon notices")
    assert not Path(private_socket).exists()


def test_a_place_where_nothing_can_be_written_is_no_crash(monkeypatch):
    with pytest.raises(DaemonUnavailable, match="TORCHWCACHE_SOCKET to a place where you may write"):
        connect_or_start("/proc/no/such/s", start=True)
    with pytest.raises(DaemonUnavailable, match="cannot start a daemon"):
        start_daemon("/proc/no/such/s")


def test_a_process_without_descriptors_says_so(private_socket):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        with pytest.raises(FileLimitError, match=f"its limit is {lowest}"):
            start_daemon(private_socket)
        with pytest.raises(FileLimitError, match=f"its limit is {lowest}"):
            connect_or_start(private_socket, start=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_interpreter_that_does_not_know_itself(private_socket, monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(DaemonUnavailable, match=r"sys\.executable"):
        start_daemon(private_socket)


# ---- a life of its own -------------------------------------------------------------------------------------------------------


def test_it_is_nobodys_child_and_has_nothing_of_its_starter(private_socket, make_memfd):
    inherited = make_memfd(b"inherited")
    os.set_inheritable(inherited, True)
    before = psutil.Process().children()  # workers of other tests, which wait for the next one
    start_daemon(private_socket, timeout_s=TIMEOUT_S)
    daemon = psutil.Process(pid_at(private_socket))
    assert daemon.ppid() != os.getpid()
    assert psutil.Process().children() == before
    assert os.getsid(daemon.pid) not in (os.getsid(0), daemon.pid)  # it can never get a terminal either
    assert os.getpgid(daemon.pid) != os.getpgid(0)
    assert daemon.cwd() == "/"
    fds = {int(fd): os.readlink(f"/proc/{daemon.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{daemon.pid}/fd")}
    assert fds[0] == "/dev/null"
    assert fds[1] == fds[2] == private_socket + ".log"
    assert os.stat(private_socket + ".log").st_mode & 0o777 == 0o600
    assert not any("memfd" in target or "pipe" in target for target in fds.values())


@pytest.mark.parametrize("how", ["exit", "kill", "group", "tree", "hangup"])
def test_it_survives_its_starter(private_socket, make_memfd, how):
    code = (
        STARTER
        + "connection.close()\nsleeper = subprocess.Popen(['sleep', '1000'])\n"
        + ("" if how == "exit" else "time.sleep(1000)\n")
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, private_socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        pid = int(process.stdout.readline())
        with DaemonConnection.connect(private_socket, timeout_s=TIMEOUT_S) as connection:
            fds = [make_memfd()]
            connection.commit(entry(0, fds), fds)
        if how == "kill":
            process.kill()
        elif how == "group":
            os.killpg(process.pid, signal.SIGKILL)
        elif how == "hangup":
            os.killpg(process.pid, signal.SIGHUP)
        elif how == "tree":
            for victim in [*psutil.Process(process.pid).children(recursive=True), process]:
                victim.kill()
        process.wait(TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdin.close()
        process.stdout.close()
    with DaemonConnection.connect(private_socket, timeout_s=TIMEOUT_S) as connection:
        assert connection.status().pid == pid
        hit, fds = connection.attach(Attach(key=K1, device="cpu", slot="/model", family=FAMILY, fields=b""))
        assert isinstance(hit, Hit)
        framing.close_fds(fds)


def test_a_kill_of_the_tree_would_reach_a_plain_child(private_socket):
    """The guard of the test above: a daemon that is started as a child dies with the tree."""
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-m', 'torchwcache.daemon', '--socket', sys.argv[1], '--foreground'])\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    with child(code, private_socket) as process:
        pid = int(line_of(process))
        assert [victim.pid for victim in psutil.Process(process.pid).children(recursive=True)] == [pid]
        os.kill(pid, signal.SIGKILL)


def test_signals_that_the_starter_blocks_still_stop_it(private_socket, wait_until):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    try:
        start_daemon(private_socket, timeout_s=TIMEOUT_S)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.kill(pid_at(private_socket), signal.SIGTERM)
    wait_until(lambda: not Path(private_socket).exists(), what="the daemon stops")


def test_it_finds_the_package_where_its_starter_found_it(private_socket, tmp_path):
    """From a source tree that is only on ``sys.path``, and from a folder with a module that must not be taken for another one."""
    source = Path(supervisor.__file__).parents[2]
    packages = Path(framing.msgspec.__file__).parents[1]
    (tmp_path / "selectors.py").write_text("raise ImportError('the wrong module')")
    code = (
        f"import sys; sys.path[:0] = [{str(source)!r}]; sys.path.append({str(packages)!r})\n"
        "from torchwcache.daemon.supervisor import start_daemon\n"
        "start_daemon(sys.argv[1], timeout_s=20)\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, private_socket], check=True, timeout=TIMEOUT_S, env=environ, cwd=tmp_path
    )
    assert pid_at(private_socket)


def test_the_interpreters_own_places_are_not_put_before_the_standard_library():
    environ = supervisor.child_environment({"PYTHONPATH": "/somewhere:relative", "OTHER": "1"})
    paths = environ["PYTHONPATH"].split(":")
    assert paths[:2] == ["/somewhere", os.path.abspath("relative")]
    assert not any(path.endswith("site-packages") for path in paths)
    assert environ["OTHER"] == "1"


def test_the_module_can_start_one_in_the_background(private_socket):
    done = subprocess.run(
        [sys.executable, "-m", "torchwcache.daemon", "--socket", private_socket, "--idle-timeout", "60"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert pid_at(private_socket)


def test_its_log_does_not_grow_without_end(private_socket):
    log = Path(private_socket + ".log")
    log.write_bytes(b"x" * (2**20 + 1))
    start_daemon(private_socket, timeout_s=TIMEOUT_S)
    text = log.read_text()
    assert len(text) < 10_000
    assert "serving at" in text


# ---- what it shares with its starter (D17) -----------------------------------------------------------------------------------


def fake_root(tmp_path, *, cgroup="0::/\n", files=()):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return str(tmp_path)


def test_on_a_bare_machine_there_is_nothing_to_warn_of(tmp_path):
    assert shared_lifetime(root=fake_root(tmp_path)) == ()
    assert shared_lifetime(root=str(tmp_path / "nothing here")) == ()


@pytest.mark.parametrize(
    "clue",
    [
        {"files": [".dockerenv"]},
        {"files": ["run/.containerenv"]},
        {"cgroup": "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-abc\n"},
        {"cgroup": "5:devices:/x\n1:name=systemd:/docker/abc\n"},
    ],
)
def test_containers_are_recognised(tmp_path, clue):
    (warning,) = shared_lifetime(root=fake_root(tmp_path, **clue))
    assert "container" in warning
    assert "torchwcache daemon" in warning


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/vllm.service\n", "vllm.service"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", "session-3.scope"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-x.scope\n", "app-x.scope"),
        ("1:name=systemd:/system.slice/sglang.service/child\n0::/\n", "sglang.service"),
    ],
)
def test_systemd_units_are_named(tmp_path, cgroup, unit):
    (warning,) = shared_lifetime(root=fake_root(tmp_path, cgroup=cgroup))
    assert f"systemd unit {unit}" in warning


def test_the_warnings_reach_log_and_status(private_socket, monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "shared_lifetime", lambda: ("it shares a container",))
    with caplog.at_level("WARNING"), connect_or_start(private_socket, start=True, timeout_s=TIMEOUT_S) as connection:
        assert connection.status().warnings == shared_lifetime()
    assert "it shares a container" in caplog.messages
    assert {record.name for record in caplog.records} == {"torchwcache.daemon.supervisor"}
