"""The command line with a real daemon and real models, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command import torchwcache, write_project

from torchwcache.cli.exit_codes import ExitCode

MODULE = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.register_buffer("steps", __import__("torch").zeros(3), persistent=False)

    def forward(self, x):
        return self.inner(x)
"""
MODEL = ("net.safetensors", "--build", "net_for_cli:Net", "--build-kwargs", '{"width": 16}')


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a module and its checkpoint."""
    return write_project(tmp_path, "net_for_cli", MODULE)


def test_the_daemon_is_started_shown_and_stopped(private_socket: str) -> None:
    started = torchwcache("daemon")
    assert started.returncode == 0, started.stderr
    assert started.stdout.startswith("started, pid ")
    again = torchwcache("daemon")
    assert again.returncode == ExitCode.ERROR
    assert again.stderr.count("\n") == 1
    pid = started.stdout.split()[2].rstrip(",")
    assert pid in again.stderr
    assert torchwcache("status").stdout.startswith("daemon 0.1.0 (protocol ")
    assert json.loads(torchwcache("status", "--json").stdout)["daemon"]["pid"] == int(pid)
    stopped = torchwcache("stop")
    assert (stopped.returncode, stopped.stdout) == (0, "stopped\n")
    assert torchwcache("status").returncode == ExitCode.NO_DAEMON


def test_foreground_ends_with_sigterm(socket_folder: Path) -> None:
    path = str(socket_folder / "front.sock")
    command = [sys.executable, "-m", "torchwcache", "daemon", "--foreground", "--socket", path]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert "serving at" in child.stderr.readline()
        assert torchwcache("status", "--socket", path).returncode == 0
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
    assert not os.path.exists(path)


def test_idle_timeout(private_socket: str) -> None:
    assert torchwcache("daemon", "--idle-timeout", "0.2").returncode == 0
    deadline = time.monotonic() + 20
    while torchwcache("status").returncode != ExitCode.NO_DAEMON:
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_load_verify_evict(project: Path) -> None:
    first = torchwcache("load", *MODEL, "--json", cwd=project)
    assert first.returncode == 0, first.stderr
    report = json.loads(first.stdout)
    assert (report["source"], report["published"]) == ("disk", True)
    second = torchwcache("load", *MODEL, cwd=project)
    assert second.stdout.startswith("source       cache\n"), second.stderr
    (entry,) = json.loads(torchwcache("status", "--json").stdout)["entries"]
    assert entry["key"] == report["fingerprint"]
    verified = torchwcache("verify", *MODEL, cwd=project)
    assert (verified.returncode, verified.stdout.splitlines()[0]) == (0, "equal"), verified.stderr
    evicted = torchwcache("evict", entry["key"][:8])
    assert evicted.stdout.startswith("freed 1 ("), evicted.stderr
    assert json.loads(torchwcache("status", "--json").stdout)["entries"] == []
    assert torchwcache("evict", entry["key"]).returncode == ExitCode.NOT_FOUND


def test_load_errors_are_one_line(project: Path) -> None:
    missing = torchwcache("load", "nowhere.safetensors", "--build", "net_for_cli:Net", cwd=project)
    assert (missing.returncode, missing.stdout) == (ExitCode.ERROR, "")
    assert "nowhere.safetensors" in missing.stderr
    assert "Traceback" not in missing.stderr
    wrong = torchwcache("load", "net.safetensors", "--build", "net_for_cli:Nothing", cwd=project)
    assert wrong.returncode != 0
    assert "Nothing" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_load_needs_a_daemon_in_mode_client(project: Path) -> None:
    assert torchwcache("load", *MODEL, cwd=project, TORCHWCACHE_MODE="client").returncode == ExitCode.NO_DAEMON


def test_demo(socket_folder: Path) -> None:
    pytest.importorskip("transformers")
    shown = torchwcache("demo", "--tiny", TMPDIR=str(socket_folder))
    assert shown.returncode == 0, shown.stdout + shown.stderr
    sources = [line.split()[1] for line in shown.stdout.splitlines() if line.strip().startswith("source")]
    assert sources == ["disk,", "cache", "cache"]
    assert "All outputs are equal bit for bit" in shown.stdout
    assert list(socket_folder.glob("torchwcache-*")) == []
