"""The real vLLM in processes of its own, each test with a daemon, a memory of checkpoints and checkpoints of its own."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from _sessions import end_session, named_memory

HERE = Path(__file__).parent
START_S = 240.0

if importlib.util.find_spec("vllm.model_executor") is None:  # "vllm" alone is also this folder
    collect_ignore_glob = ["test_*.py"]


class Engine:
    """One vLLM engine in a process (and what processes it makes)."""

    def __init__(self, log: Path, order: dict[str, Any], environment: dict[str, str]) -> None:
        self.log_path = log
        self._log = log.open("wb")
        self._buffer = b""
        self._named: set[str] = set()
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_process.py"), json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") + self._buffer.decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        """What the cache said, one line a rank."""
        return [
            line[line.index("torchwcache, ") :]
            for line in self.log.splitlines()
            if re.search(r"torchwcache, (one rank|rank \d)", line)
        ]

    def result(self, timeout_s: float = START_S) -> dict[str, Any]:
        """The next thing that the engine says."""
        deadline = time.monotonic() + timeout_s
        assert self.process.stdout
        while True:
            for line in self._buffer.splitlines(keepends=True):
                if line.endswith(b"\n"):
                    self._buffer = self._buffer[len(line) :]
                    if line.startswith(b"RESULT "):
                        self._named |= named_memory(self.process)  # now: whoever is killed next leaves it behind
                        return json.loads(line[7:])
                    with self.log_path.open("ab") as log:
                        log.write(line)
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                pytest.fail(f"no answer within {timeout_s:.0f} s:\n{self.log[-6000:]}")
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                pytest.fail(f"the engine ended with {self.process.wait(30)}:\n{self.log[-6000:]}")
            self._buffer += data

    def fails(self, timeout_s: float = START_S) -> str:
        """Wait for an engine that must not start; returns its log."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._named |= named_memory(self.process)
            try:
                out, _ = self.process.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                assert time.monotonic() < deadline, f"still up after {timeout_s:.0f} s:\n{self.log[-6000:]}"
        self._buffer += out
        assert self.process.returncode != 0, self.log[-4000:]
        assert b"RESULT" not in out
        return self.log

    def do(self, **command: Any) -> dict[str, Any]:
        """Have a waiting engine do something."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        return self.result()

    def workers(self) -> list[psutil.Process]:
        """The processes that hold the model."""
        me = psutil.Process(self.process.pid)
        return [child for child in me.children(recursive=True) if "Worker" in " ".join(child.cmdline()) or "Worker" in child.name()]

    def kill(self) -> None:
        """End every process of it at once."""
        end_session(self.process, named=self._named)

    def end(self) -> None:
        self._named |= named_memory(self.process)
        if self.process.poll() is None and self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        self.kill()
        self._log.close()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


@pytest.fixture
def vllm(tmp_path: Path, private_socket: str) -> Iterator[Callable[..., Engine]]:
    """Starts engines; those still up at the end are ended."""
    started: list[Engine] = []

    def start(model: Path | str, *, environment: dict[str, str] | None = None, in_process: bool = True, **order: Any) -> Engine:
        fixed = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
            "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": str(tmp_path / "xdg"),
            "TORCHWCACHE_SOCKET": private_socket,
        }
        engine = Engine(tmp_path / f"engine{len(started)}.log", {"model": str(model), **order}, {**fixed, **(environment or {})})
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.end()


@pytest.fixture
def run(vllm: Callable[..., Engine]) -> Callable[..., tuple[list[list[int]], str]]:
    """Start an engine, let it answer, end it; gives its tokens, and the lines of its ranks."""

    def start(*args: Any, **order: Any) -> tuple[list[list[int]], str]:
        engine = vllm(*args, **order)
        result = engine.result()
        engine.end()
        return result["tokens"], "\n".join(engine.lines)

    return start


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by kind, each made once."""
    made: dict[str, Path] = {}

    def get(kind: str, seed: int = 0) -> Path:
        key = f"{kind}{seed}"
        if key not in made:
            folder = tmp_path_factory.mktemp(key)
            subprocess.run([sys.executable, str(HERE / "checkpoints.py"), kind, str(folder), str(seed)], check=True, timeout=120)
            made[key] = folder
        return made[key]

    return get


class Watch:
    """Whether any process opened or read a file, by inotify."""

    _OPEN, _ACCESS = 0x20, 0x01

    def __init__(self, paths: list[Path]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK)
        self._names = {
            self._libc.inotify_add_watch(self._fd, os.fsencode(path), self._OPEN | self._ACCESS): path.name for path in paths
        }
        assert -1 not in self._names

    def seen(self) -> dict[str, int]:
        """How often each file was opened or read since the last look."""
        found: dict[str, int] = {}
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fd, 65536):
                while data:
                    number, _, _, length = struct.unpack_from("iIII", data)
                    data = data[16 + length :]
                    found[self._names[number]] = found.get(self._names[number], 0) + 1
        return found

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def watch() -> Iterator[Callable[[list[Path]], Watch]]:
    made: list[Watch] = []

    def start(paths: list[Path]) -> Watch:
        made.append(Watch(paths))
        return made[-1]

    yield start
    for item in made:
        item.close()
