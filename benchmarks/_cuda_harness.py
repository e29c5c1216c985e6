"""What the GPU benchmarks share: a daemon of their own, and worker processes that are led step by step. Imports no torch.

No process of the benchmark itself has a CUDA context: every measurement, and everything that is measured, is in a worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import _report
from _cuda_worker import QUIET_FILE
from _report import Report, spread

from torchwcache.daemon.supervisor import start_daemon
from torchwcache.errors import DaemonError
from torchwcache.wire.client import DaemonConnection

MIB, GIB = 1 << 20, 1 << 30
WORKER = Path(__file__).with_name("_cuda_worker.py")
STEP_TIMEOUT_S = 240.0
EXIT_TIMEOUT_S = 30.0
VARIANT = "bench"


class WorkerError(RuntimeError):
    """Raised when a worker ended, or said nothing for too long; has the end of what it wrote to stderr."""


class Worker:
    """A worker process: it says a line of JSON after each step, and waits to be told to take the next one."""

    def __init__(self, command: Sequence[str], environ: dict[str, str], log: Path) -> None:
        self.what, self.log = command[2], log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0
            )
        self._said = b""
        self._steps = 0
        self._ready: dict[str, Any] | None = None

    def step(self) -> dict[str, Any]:
        """Let it take its next step, and wait for what comes out. It takes its first step by itself."""
        if self._steps:
            assert self.process.stdin is not None
            try:
                self.process.stdin.write(b"go\n")
            except BrokenPipeError:
                raise self._failure("ended") from None
        self._steps += 1
        found: dict[str, Any] = json.loads(self._line())
        return found

    def ready(self) -> dict[str, Any]:
        """What its first step says, waited for once."""
        if self._ready is None:
            self._ready = self.step()
        return self._ready

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while b"\n" not in self._said:
            ready, _, _ = select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise self._failure(f"said nothing for {STEP_TIMEOUT_S:g} s")
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise self._failure("ended")
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line

    def _failure(self, how: str) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        last = self.log.read_text(errors="replace")[-3000:]
        return WorkerError(f"{self.what} {how} (exit code {self.process.poll()}):\n{last}")

    def close(self) -> None:
        """Tell it to end, and see to it that it does. Idempotent."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        for left in Path("/dev/shm").glob(f"torch_{self.process.pid}_*"):  # torch's counters: clients that just exit leave them
            left.unlink(missing_ok=True)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Harness:
    """A private folder, a daemon in it, and the workers.

    Args:
        name: Of the benchmark.
        folder: For checkpoints, sockets and logs.
        device: ``"cuda"``, or ``"cpu"`` to try the benchmark itself.
    """

    def __init__(self, name: str, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.report = Report(name)
        self.socket = str(folder / "run" / "daemon.sock")
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHWCACHE_")}
        self.environ |= {"TORCHWCACHE_SOCKET": self.socket, "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        self.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self.environ[QUIET_FILE] = str(folder / "quiet.json")
        self.save: Callable[[], None] = lambda: None
        self._workers = 0
        self._started_s = time.monotonic()

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started_s:6.1f} s] {text}", file=sys.stderr, flush=True)

    # ---- workers -----------------------------------------------------------------------------------------------------------

    def worker(self, function: str, /, *, script: Path = WORKER, **arguments: Any) -> Worker:
        """Start one function of a worker script in a process of its own; does not wait for it."""
        self._workers += 1
        log = self.folder / f"worker-{self._workers}.log"
        command = [sys.executable, str(script), function, json.dumps(arguments)]
        return Worker(command, self.environ, log)

    def work(self, function: str, /, **arguments: Any) -> dict[str, Any]:
        """Run a function that has one step."""
        with self.worker(function, **arguments) as worker:
            return worker.step()

    def measured(self, function: str, prepare: Callable[[], Any], /, **arguments: Any) -> dict[str, Any]:
        """Run a function of two steps, to get ready and to measure, in a fresh process, which gets ready while ``prepare`` runs."""
        with self.worker(function, **arguments) as worker:
            prepare()
            self.note_gpu(worker.ready())
            return worker.step()

    def note_gpu(self, ready: dict[str, Any]) -> None:
        """What a worker that has a context says of its device, and what the driver's own tool says."""
        if self.on_gpu and "gpu" not in self.report.machine and ready.get("gpu"):
            self.report.machine["gpu"] = {**ready["gpu"], **driver_facts()}

    # ---- the daemon --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def daemon(self) -> Iterator[None]:
        start_daemon(self.socket)
        try:
            yield
        finally:
            with contextlib.suppress(DaemonError), DaemonConnection.connect(self.socket) as connection:
                connection.stop()

    def evict(self) -> None:
        with DaemonConnection.connect(self.socket) as connection:
            connection.evict(everything=True)

    def daemon_facts(self, producer: int) -> dict[str, Any]:
        """What the daemon holds and costs, while it holds one entry.

        Args:
            producer: A process that surely uses the GPU. Where the driver does not list even that one, it says nothing of others.
        """
        with DaemonConnection.connect(self.socket) as connection:
            status, entries = connection.status(), connection.entries()
        memory = Path(f"/proc/{status.pid}/status").read_text()
        users = gpu_users()
        return {
            "segments": sum(entry.segments for entry in entries),
            "fds": len(os.listdir(f"/proc/{status.pid}/fd")),
            "rss_mb": int(memory.partition("VmRSS:")[2].split()[0]) * 1024 / 1e6,
            "gpu_contexts": int(status.pid in users) if producer in users else None,
        }

    # ---- rows --------------------------------------------------------------------------------------------------------------

    def row(self, kind: str, what: dict[str, Any], values: dict[str, Sequence[float]]) -> dict[str, Any]:
        """The medians as they are; the least of each, and all values, beside them."""
        found = {key: spread(value) for key, value in values.items()}
        medians = {key: value["median"] for key, value in found.items()}
        least = {key: value["min"] for key, value in found.items()}
        row = self.report.add(kind, **what, **medians, least=least, values=values, repeats=next(iter(found.values()))["repeats"])
        self.say(f"  {kind}: " + ", ".join(f"{key} {_report.shown(value)}" for key, value in ({**what, **medians}).items()))
        return row

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """One part of a run: when it fails, the others are measured all the same, and the result is not complete."""
        self.say(name)
        try:
            yield
        except (WorkerError, DaemonError, AssertionError) as error:
            self.say(f"FAILED: {name}: {type(error).__name__}: {error}")
            self.report.add("failed", what=name, why=str(error)[-1500:])
            with contextlib.suppress(DaemonError):
                self.evict()
        self.save()

    @property
    def failed(self) -> bool:
        return any(row["kind"] == "failed" for row in self.report.rows)


# ---- the machine ------------------------------------------------------------------------------------------------------------


def _nvidia_smi(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def driver_facts() -> dict[str, Any]:
    """Driver version and persistence mode of the first GPU, as far as ``nvidia-smi`` says."""
    names = ("driver_version", "persistence_mode")
    said = _nvidia_smi(f"--query-gpu={','.join(names)}", "--format=csv,noheader")
    values = said.splitlines()[0].split(", ") if said else [None, None]
    return {"driver": values[0], "persistence_mode": values[1]}


def gpu_users() -> set[int]:
    """Processes that use the GPU, as the driver lists them (inside some containers it lists none)."""
    said = _nvidia_smi("--query-compute-apps=pid", "--format=csv,noheader") or ""
    return {int(line) for line in said.split() if line.isdigit()}


# ---- the command line -------------------------------------------------------------------------------------------------------


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda; cpu runs the same on host memory, to try the benchmark itself")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats: shows that it works, not how fast it is")
    parser.add_argument("--out", type=Path, help="where the JSON goes (default: benchmarks/results/, nowhere with --quick)")
    parser.add_argument("--dir", type=Path, help="where checkpoints and the daemon's socket live meanwhile")
    parser.add_argument("--docs", action="store_true", help="write docs/benchmarks.md from the result")
    parser.add_argument("--docs-only", action="store_true", help="write docs/benchmarks.md from the last result; measure nothing")
    return parser


def run(
    name: str,
    args: argparse.Namespace,
    measure: Callable[[Harness], None],
    tables: Sequence[_report.Table],
    write_docs: Callable[[dict[str, Any]], None],
    suffix: str = "",
    **options: Any,
) -> None:
    """Everything that a benchmark's ``main`` does but measuring. Exits with 1 when a part failed.

    Args:
        suffix: Of the name of the result, where a benchmark has several.
    """
    default = _report.RESULTS / f"{name}{suffix}.json"
    if args.docs_only:
        write_docs(json.loads((args.out or default).read_text()))
        return
    small = args.quick or args.device == "cpu"
    out = args.out or (None if small else default)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that what follows is cleaned up then, too
    with tempfile.TemporaryDirectory(prefix="torchwcache-bench-", dir=args.dir) as folder:
        harness = Harness(name, Path(folder), args.device)

        def result_so_far(*, complete: bool) -> dict[str, Any]:
            result = harness.report.as_dict(complete=complete, options={"quick": args.quick, "device": args.device, **options})
            if out is not None:
                _report.write(out, result)
            return result

        def save() -> None:
            result_so_far(complete=False)

        harness.save = save
        try:
            measure(harness)
        except BaseException:
            save()  # what was measured so far is not lost
            raise
        result = result_so_far(complete=not small and not harness.failed)
    print(_report.tables_text(result, tables, heading="#"))
    harness.say("done")
    if args.docs:
        write_docs(json.loads(json.dumps(result)))
    if harness.failed:
        sys.exit("parts of this benchmark failed (see above); the result is not complete")


def ms(seconds: float) -> float:
    return seconds * 1e3
