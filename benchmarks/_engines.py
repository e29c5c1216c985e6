"""Real engines in processes of their own, led step by step, and what can be seen of them from outside. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _cuda_harness import WorkerError
from _sessions import end_session, named_memory

START_S = 420.0
HERE = Path(__file__).parent
WORKERS = {"vllm": HERE / "_engine_vllm.py", "sglang": HERE / "_engine_sglang.py"}

WEIGHTS = re.compile(r"Model loading took [\d.]+ GiB (?:memory )?and ([\d.]+) seconds|Load weight end\. elapsed=([\d.]+) s")
"""What vLLM (``gpu_model_runner.py``) and SGLang (``model_runner.py``) log when the loader has returned, one line a rank."""
CACHE = re.compile(r"torchwcache, (?:one rank|rank \d+ of \d+).*")


class Engine:
    """One engine: a process, and those that it makes.

    Args:
        kind: Which engine.
        order: For its worker script.
        environ: All of its environment.
        log: Where what it writes goes.
        python: The interpreter of the environment that has the engine.
    """

    def __init__(
        self, kind: str, order: Mapping[str, Any], environ: Mapping[str, str], log: Path, python: str = sys.executable
    ) -> None:
        self.kind, self.log = kind, log
        self._out = b""
        self._named: set[str] = set()
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [python, str(WORKERS[kind]), json.dumps({"spawned": time.monotonic(), **order})],
                env=dict(environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0, start_new_session=True,
            )  # fmt: skip

    @property
    def text(self) -> str:
        """All that it and its processes wrote."""
        return self.log.read_text(errors="replace")

    def result(self, timeout_s: float = START_S) -> dict[str, Any]:
        """The next thing that it says."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while True:
            line, found, rest = self._out.partition(b"\n")
            if found:
                self._out = rest
                if line.startswith(b"RESULT "):
                    said: dict[str, Any] = json.loads(line[7:])
                    return said
                with self.log.open("ab") as log:  # SGLang and vLLM log to either
                    log.write(line + b"\n")
                continue
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            if not data:
                how = "ended" if ready else f"said nothing for {timeout_s:g} s"
                self.kill()
                raise WorkerError(f"{self.kind} {how} (exit code {self.process.poll()}):\n{self.text[-6000:]}")
            self._out += data

    def do(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        return self.result(120.0)

    def seen(self) -> dict[str, Any]:
        """What its log says of the weights: seconds of the slowest rank, and what the cache did."""
        text = self.text
        seconds = [float(first or second) for first, second in WEIGHTS.findall(text)]
        lines = sorted({line[line.index("torchwcache, ") :] for line in text.splitlines() if CACHE.search(line)})
        return {"weights_s": max(seconds, default=None), "cache": lines}

    def kill(self) -> None:
        """``kill -9`` of every process of it. Idempotent."""
        end_session(self.process, named=self._named)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def end(self) -> None:
        """Let it end by itself, and see to it that it does. Idempotent."""
        self._named = named_memory(self.process)
        if self.process.poll() is None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(40)
        self.kill()


def gpu_used_mib(gpus: Sequence[str]) -> int | None:
    """MiB in use on these GPUs, as the driver says to everybody; ``None`` where there is no GPU."""
    if not gpus:
        return None
    command = ["nvidia-smi", f"--id={','.join(gpus)}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=30.0, check=True).stdout
    return sum(int(line) for line in said.split())


def settled_mib(gpus: Sequence[str], *, most: int | None = None, timeout_s: float = 20.0) -> int | None:
    """As :func:`gpu_used_mib`, when it is the same three times running, or at most ``most``: memory of the dead comes back late."""
    deadline = time.monotonic() + timeout_s
    seen: list[int | None] = []
    while time.monotonic() < deadline:
        seen.append(gpu_used_mib(gpus))
        last = seen[-1]
        if last is None or (most is not None and last <= most) or (most is None and len(seen) >= 3 and len(set(seen[-3:])) == 1):
            break
        time.sleep(0.3)
    return seen[-1]
