"""Engines, daemons and their logs as the tests see them: real processes, bounded in every wait, ended by pid."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import re
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from _sessions import end_session, named_memory
from engine_process import ENGINE_OPTIONS, PROMPTS, SAMPLING

HERE = Path(__file__).parent
TIMEOUT_S = 180.0
_LINE = re.compile(r"torchwcache, (?:rank (\d+) of \d+|one rank), (target|draft): (hit|waited|miss)(.*)")


class EngineDied(Exception):
    """An engine ended, or did not answer; carries its log."""


def environment(daemon: Path, cache: Path, **more: str) -> dict[str, str]:
    """For a process with SGLang in it, on the CPU."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG", "TORCHWCACHE"))}
    return {
        **inherited,
        "PYTHONPATH": str(HERE / "standin"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(cache),
        "TORCHWCACHE_SOCKET": str(daemon),
        **more,
    }


class Line:
    """What one rank said about its start."""

    def __init__(self, found: re.Match[str]) -> None:
        self.rank = int(found[1] or 0)
        self.role, self.what, self.text = found[2], found[3], found[0]
        self.published = "published;" in found[4]


class Running:
    """A process with an engine in it, in a session of its own. A context manager: leaving it ends it and all it started."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str], **streams: int) -> None:
        self.log = log
        self._named: set[str] = set()
        self._errors = log.open("wb")
        where = {"stdin": subprocess.DEVNULL, "stdout": self._errors, "stderr": self._errors, **streams}
        self._process = subprocess.Popen(command, **where, env=env, cwd=log.parent, start_new_session=True)

    @property
    def said(self) -> str:
        self._errors.flush()
        return self.log.read_text(errors="replace")

    @property
    def lines(self) -> list[Line]:
        """What the ranks said, in the order of the ranks."""
        return sorted((Line(found) for found in _LINE.finditer(self.said)), key=lambda line: (line.role, line.rank))

    def kill(self) -> None:
        """As an operator's ``kill -9`` of the whole engine."""
        end_session(self._process, named=self._named)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()


class Engine(Running):
    """One engine in a program of a user's."""

    def __init__(self, model: Path, log: Path, env: dict[str, str], **options: Any) -> None:
        order = json.dumps({"model": str(model), "options": options})
        command = [sys.executable, str(HERE / "engine_process.py"), order]
        super().__init__(command, log, env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._buffer = b""

    def started(self) -> list[list[int]]:
        """The tokens of the first answer."""
        return self._answer()["tokens"]

    def ask(self, **order: Any) -> dict[str, Any]:
        """Give an order, and wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def generate(self, **how: Any) -> list[list[int]]:
        return self.ask(do="generate", how=how)["tokens"]

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
                    self._named |= named_memory(self._process)
                    return json.loads(line.removeprefix(b"RESULT "))
                self._errors.write(line + b"\n")  # SGLang's workers write to the same output
                continue
            if not select.select([self._process.stdout], [], [], 0.5)[0]:
                self._named |= named_memory(self._process)  # now: whoever dies, or is killed, next leaves it behind
                if time.monotonic() > deadline:
                    raise EngineDied(f"no answer within {TIMEOUT_S} s\n{self.said[-4000:]}")
                continue
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


class Server(Running):
    """An engine behind SGLang's own web server, on a port that was free.

    Args:
        launch: The command that starts it, up to its options.
        options: Options of SGLang's, beside those that a small engine on the CPU needs.
    """

    def __init__(self, model: Path, log: Path, env: dict[str, str], *, launch: list[str], **options: Any) -> None:
        self.port = _free_port()
        options = {**ENGINE_OPTIONS, "model_path": model, "port": self.port, "skip_server_warmup": True, **options}
        super().__init__([*launch, *_flags(options)], log, env)

    def started(self) -> list[list[int]]:
        """Wait until it answers; the tokens of the first answer."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                if self.ask("/health", timeout_s=20)[0] == 200:
                    return self.generate()
            except OSError:
                if self._process.poll() is not None:
                    raise EngineDied(f"the server ended\n{self.said[-6000:]}") from None
            time.sleep(0.2)
        raise EngineDied(f"no answer within {TIMEOUT_S} s\n{self.said[-4000:]}")

    def ask(self, path: str, body: object = None, *, timeout_s: float = 60) -> tuple[int, str]:
        """The status and the text of an answer; each time on a connection of its own, so that any worker may get it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            text = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            self._named |= named_memory(self._process)
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def generate(self) -> list[list[int]]:
        found = []
        for prompt in PROMPTS:
            status, text = self.ask("/generate", {"input_ids": prompt, "sampling_params": SAMPLING})
            assert status == 200, text
            found.append(json.loads(text)["output_ids"])
        return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _flags(options: dict[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        yield "--" + name.replace("_", "-")
        if value is not True:
            yield str(value)


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
