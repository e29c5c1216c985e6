"""Engines, daemons and their logs as the tests see them: real processes, bounded in every wait, ended by pid."""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TIMEOUT_S = 180.0
_LINE = re.compile(r"torchwcache, (?:rank (\d+) of \d+|one rank), (target|draft): (hit|waited|miss)(.*)")


class EngineDied(Exception):
    """An engine ended, or did not answer; carries its log."""


def environment(socket: Path, cache: Path, **more: str) -> dict[str, str]:
    """For a process with SGLang in it, on the CPU."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG", "TORCHWCACHE"))}
    return {
        **inherited,
        "PYTHONPATH": str(HERE / "standin"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(cache),
        "TORCHWCACHE_SOCKET": str(socket),
        **more,
    }


class Line:
    """What one rank said about its start."""

    def __init__(self, found: re.Match[str]) -> None:
        self.rank = int(found[1] or 0)
        self.role, self.what, self.text = found[2], found[3], found[0]
        self.published = "published;" in found[4]


class Engine:
    """One engine. A context manager: leaving it ends the engine and all it started."""

    def __init__(self, model: Path, log: Path, env: dict[str, str], **options: Any) -> None:
        self.log = log
        self._errors = log.open("wb")
        self._buffer = b""
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_process.py"), json.dumps({"model": str(model), "options": options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=env,
            cwd=log.parent,
            start_new_session=True,
        )

    def started(self) -> list[list[int]]:
        """The tokens of the first answer."""
        return self._answer()["tokens"]

    def ask(self, **order: Any) -> dict[str, Any]:
        """Give an order, and wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def generate(self) -> list[list[int]]:
        return self.ask(do="generate")["tokens"]

    def call(self, name: str, **kwargs: Any) -> dict[str, Any]:
        return self.ask(do="call", name=name, kwargs=kwargs)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                if line.startswith(b"RESULT "):
                    return json.loads(line.removeprefix(b"RESULT "))
                self._errors.write(line + b"\n")  # SGLang's workers write to the same output
                continue
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise EngineDied(f"no answer within {TIMEOUT_S} s\n{self.said[-4000:]}")
            data = os.read(self._process.stdout.fileno(), 65536)
            if not data:
                raise EngineDied(f"the engine ended\n{self.said[-6000:]}")
            self._buffer += data

    def failed(self) -> str:
        """Wait for an engine that is not to start; what it said."""
        try:
            tokens = self._answer()
        except EngineDied:
            return self.said
        raise AssertionError(f"the engine started: {tokens}")

    @property
    def said(self) -> str:
        self._errors.flush()
        return self.log.read_text(errors="replace")

    @property
    def lines(self) -> list[Line]:
        """What the ranks said, in the order of the ranks."""
        return sorted((Line(found) for found in _LINE.finditer(self.said)), key=lambda line: (line.role, line.rank))

    def workers(self) -> dict[str, int]:
        """Pids of the processes that the engine started, by the titles that SGLang gives them."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _session(entry) == self._process.pid:
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if title.startswith("sglang::"):
                    found[title] = int(entry.name)
        return found

    def kill(self) -> None:
        """As an operator's ``kill -9`` of the whole engine."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        # All in the session that was made for it, and nothing else.
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _session(entry) == self._process.pid:
                try:
                    os.kill(int(entry.name), number)
                except ProcessLookupError:
                    continue
        self._process.wait(timeout=30)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(signal.SIGKILL)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()


def _session(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, IndexError, ValueError):
        return -1


class OpenedFiles:
    """Which of some files any process opens meanwhile, whatever it is written in (inotify). A context manager."""

    def __init__(self, *paths: Path) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._fd = self._library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._fd >= 0
        self._names = {self._watch(path): path.name for path in paths}
        self.names: list[str] = []

    def _watch(self, path: Path) -> int:
        opened = 0x20
        number = int(self._library.inotify_add_watch(self._fd, os.fsencode(path), opened))
        assert number >= 0, path
        return number

    def look(self) -> list[str]:
        """Names of files that were opened so far."""
        while True:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return self.names
            while data:
                number, _, _, length = struct.unpack_from("iIII", data)
                self.names.append(self._names[number])
                data = data[16 + length :]

    def __enter__(self) -> OpenedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.look()
        os.close(self._fd)


def offline(env: dict[str, str], scenario: str, **arguments: Any) -> dict[str, Any]:
    """A scenario of ``offline_process.py`` in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(HERE / "offline_process.py"), scenario, json.dumps(arguments)],
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise AssertionError(f"{scenario} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")


def command(env: dict[str, str], *arguments: str) -> str:
    """A ``torchwcache`` command."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("torchwcache")), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr
