"""How the real vLLM and the real SGLang start: from disk, from torchwcache, and from the engine's own weight cache.

    python benchmarks/engine_restart.py vllm|sglang [--device cuda|cpu] [--quick] [--parts bf16,fp8,large,idle,graphs,tp2]
        [--logs FOLDER] [--out FILE] [--dir FOLDER] [--docs | --docs-only]

Makes checkpoints with random weights; starts the engine from disk with its files in the page cache, as the first that uses the
cache, a second one beside it on the same GPU, kills both with SIGKILL, starts again, and kills the daemon under it. Tokens must be
the same throughout. Every part has a GPU of its own where there are several; `tp2` needs two. Needs the engine in the same
environment, and 20 GiB of disk.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _cuda_harness
import _report
from _cuda_harness import Harness, WorkerError
from _engines import WORKERS, Engine, gpu_used_mib, settled_mib
from _report import Table, Target
from _sessions import end_session

from torchwcache.daemon.supervisor import start_daemon
from torchwcache.errors import DaemonError
from torchwcache.wire.client import DaemonConnection

NAME = Path(__file__).stem
PROMPTS = [[11, 23, 5, 99, 301], [7, 7, 42], [900, 3, 14, 159, 265, 358]]
TOKENS = 16
SETTLED_S = 2.5
"""Only files that were last touched longer ago than two seconds have an identity that can be remembered."""
WATCHED_S = 20.0
GIB = 1 << 30

WAYS = {
    "disk": "from disk, page cache warm",
    "again": "from disk again, all kernels compiled",
    "first": "first with the cache: load and publish",
    "second": "from the cache, beside the first",
    "restart": "from the cache, after kill -9 of all engines",
    "own": "from the engine's own weight cache",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One checkpoint, and how engines are started with it.

    Attributes:
        beside: Start a second engine beside the first, and let it sleep; kill the daemon under the last.
        own: Start from the engine's own weight cache, too.
        idle_gib: How much of weights that nobody uses lies on the GPU when the first engine starts with the cache.
        again: Start from disk twice, and compare with the second: the first one compiles the model.
    """

    kind: str
    gib: float
    title: str
    tp: int = 1
    beside: bool = False
    own: bool = False
    idle_gib: float = 0.0
    again: bool = False
    options: tuple[tuple[str, Any], ...] = ()


def parts_for(engine: str, *, on_gpu: bool, small: bool) -> dict[str, Part]:
    gib = 8.0 if on_gpu and not small else 0.02
    fraction = "gpu_memory_utilization" if engine == "vllm" else "mem_fraction_static"
    sharded = "tensor_parallel_size" if engine == "vllm" else "tp_size"
    graphs = ("enforce_eager" if engine == "vllm" else "disable_cuda_graph", False)
    most = ((fraction, 0.92 if engine == "vllm" else 0.9),) if on_gpu else ()
    parts = {
        "bf16": Part(kind="bf16", gib=gib, title="bf16", beside=True, own=engine == "sglang" and on_gpu),
        "fp8": Part(kind="fp8", gib=gib, title="block-wise FP8", beside=True),
        "large": Part(kind="large", gib=gib if small else 92.0, title="large, bf16", options=most),
        "idle": Part(kind="bf16", gib=gib, title="bf16, beside idle weights", idle_gib=0.02 if small else 100.0, options=most),
        "graphs": Part(kind="bf16", gib=gib, title="bf16, CUDA graphs", again=True, options=(graphs,)),
        "tp2": Part(kind="bf16", gib=gib, title="bf16, two ranks", tp=2, options=((sharded, 2),)),
    }
    return parts if on_gpu else {"bf16": parts["bf16"], "tp2": parts["tp2"]}


class Chain:
    """The starts of one part, one after the other, with a daemon of their own."""

    def __init__(self, bench: Bench, name: str, part: Part, gpus: Sequence[str]) -> None:
        self.bench, self.name, self.part, self.gpus = bench, name, part, gpus
        self.folder = bench.harness.folder / name
        self.folder.mkdir(mode=0o700)
        self.model = bench.checkpoints[part.kind, part.gib]
        self.socket = str(self.folder / "run" / "daemon.sock")
        self.tokens: list[list[int]] | None = None
        self.kv: dict[str, int | None] = {}
        self.kv_block = 1
        self.engines: list[Engine] = []
        self.daemon_pid = 0
        self.closed = False

    def environ(self, *, cache: bool) -> dict[str, str]:
        environ = dict(self.bench.harness.environ)
        environ |= {"TORCHWCACHE_SOCKET": self.socket, "XDG_CACHE_HOME": str(self.folder / "cache"), "VLLM_NO_USAGE_STATS": "1"}
        if self.gpus:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        else:
            environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
            if self.part.tp > 1:
                cores = "|".join(map(str, range(self.part.tp)))
                environ |= {"SGLANG_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_OMP_THREADS_BIND": cores}
        if cache and self.bench.engine == "sglang":
            environ["TORCHWCACHE_MODE"] = "client"
        return environ

    def launch(self, way: str, kind: str, **options: Any) -> Engine:
        if self.closed:
            raise WorkerError("told to end")
        if self.bench.engine == "sglang" and not self.gpus:
            options["device"] = "cpu"
        order = {
            "model": str(self.model), "way": kind, "prompts": PROMPTS, "tokens": TOKENS, "wait": True,
            "device": self.bench.harness.device, "options": {**dict(self.part.options), **options},
        }  # fmt: skip
        log = self.folder / f"{way}.log"
        engine = Engine(self.bench.engine, order, self.environ(cache=kind == "cache"), log)
        self.engines.append(engine)
        if self.closed:
            engine.kill()
        return engine

    def start(self, way: str, kind: str, **options: Any) -> Engine:
        """Start one, and note what came of it."""
        before = gpu_used_mib(self.gpus)
        engine = self.launch(way, kind, **options)
        found = engine.result()
        after = gpu_used_mib(self.gpus)
        seen = engine.seen()
        tokens = found["tokens"]
        self.tokens = self.tokens if self.tokens is not None else tokens
        self.kv[way] = found["kv_tokens"]
        self.kv_block = found.get("kv_block") or 1
        row = {
            "part": self.part.title, "way": way, "name": WAYS[way], "weights_s": seen["weights_s"], "kv_tokens": found["kv_tokens"],
            **{f"{phase}_s": seconds for phase, seconds in found["seconds"].items()},
            "until_first_s": found["until_first_s"], "same_tokens": tokens == self.tokens,
            "distinct_tokens": len({token for line in tokens for token in line}),
            "used_gib": None if before is None or after is None else (after - before) / 1024,
            "version": found["version"], "cache": seen["cache"], "options": options,
        }  # fmt: skip
        with self.bench.lock:
            self.bench.report.add("start", **row)
            shown = {key: row[key] for key in ("weights_s", "engine_s", "until_first_s", "kv_tokens", "same_tokens", "used_gib")}
            self.bench.harness.say(f"{self.name}: {WAYS[way]}: {shown} {seen['cache']}")
            self.bench.harness.save()
        self.check(f"{WAYS[way]}: the same tokens", tokens == self.tokens)
        if kind == "cache":
            words = " ".join(seen["cache"])
            self.check(f"{WAYS[way]}: the cache says so", ("published" if way == "first" else "hit") in words)
        return engine

    def check(self, what: str, passed: bool, *, seen: str = "") -> None:
        with self.bench.lock:
            self.bench.report.add("check", part=self.part.title, what=what, passed=passed, seen=seen)
            if not passed:
                self.bench.harness.say(f"{self.name}: NOT: {what} {seen}")

    def memory(self, when: str, used: int | None) -> None:
        if used is not None:
            with self.bench.lock:
                self.bench.report.add("memory", part=self.part.title, when=when, used_gib=used / 1024)

    def run(self) -> None:
        part, at_first = self.part, settled_mib(self.gpus)
        self.memory("before everything", at_first)
        self.start("disk", "disk").end()
        self.memory("the engine from disk has ended", settled_mib(self.gpus, most=at_first))
        if part.again:
            self.start("again", "disk").end()
            settled_mib(self.gpus, most=at_first)
        self.start_daemon()
        if part.idle_gib:
            self.leave_idle()
        engine = self.start("first", "cache")
        if part.idle_gib > 1:  # too much to stay
            with DaemonConnection.connect(self.socket) as connection:
                self.check("what nobody used was evicted", len(connection.entries()) == part.tp)
        if part.beside:
            self.beside(engine)
        for running in self.engines:
            running.kill()
        held = settled_mib(self.gpus)
        self.memory("all engines were killed: what the daemon holds", held)
        if held is not None and at_first is not None:
            weights = self.entries_nbytes() / GIB
            extra = (held - at_first) / 1024 - weights
            self.check("killed engines leave the weights once, and nothing else", abs(extra) < 0.1, seen=f"{extra:+.3f} GiB")
        engine = self.start("restart", "cache")
        if part.beside:
            os.kill(self.daemon_pid, signal.SIGKILL)
            said = self.goes_on(engine)
            self.check("the daemon killed: the engine goes on", "goes on" in said, seen=said)
        engine.end()
        if part.beside:
            self.memory("the daemon and all engines are gone", settled_mib(self.gpus, most=at_first))
        self.compare_kv()
        if part.own:
            self.own()

    def leave_idle(self) -> None:
        """Weights of another model, published by a process that has ended."""
        script = Path(__file__).with_name("_engine_idle.py")
        command = [sys.executable, str(script), str(self.folder), self.bench.harness.device, str(self.part.idle_gib)]
        subprocess.run(command, check=True, stdout=sys.stderr, env=self.environ(cache=False), timeout=300.0)
        self.memory("weights that nobody uses", settled_mib(self.gpus))

    def beside(self, first: Engine) -> None:
        alone = gpu_used_mib(self.gpus)
        sleeping = {"enable_sleep_mode": True} if self.bench.engine == "vllm" and self.gpus else {}
        second = self.start("second", "cache", **sleeping)
        both = gpu_used_mib(self.gpus)
        self.memory("the first engine", alone)
        self.memory("two engines on one GPU", both)
        self.check("both answer at once", first.do(do="generate")["tokens"] == second.do(do="generate")["tokens"] == self.tokens)
        if not self.gpus:
            return
        if self.bench.engine == "vllm":
            asleep = second.do(do="call", name="sleep", kwargs={"level": 1})
            self.memory("the second asleep (level 1)", settled_mib(self.gpus))
            awake = second.do(do="call", name="wake_up") if "error" not in asleep else {}
        else:
            asleep = second.do(do="call", name="release_memory_occupation")
            self.memory("the second after release_memory_occupation", settled_mib(self.gpus))
            awake = second.do(do="call", name="resume_memory_occupation") if "error" not in asleep else {}
        works = second.do(do="generate")["tokens"] == self.tokens
        said = str(asleep.get("error") or awake.get("error") or "slept and woke")
        self.check("sleep, then the same tokens (or refused in words)", works, seen=said[:300])

    def compare_kv(self) -> None:
        """The KV cache of every start with the same flags, against that of the start from disk."""
        for way in ("first", "restart"):
            disk, here = self.kv["again" if self.part.again else "disk"], self.kv[way]
            if disk is not None and here is not None and self.gpus:
                away = (here - disk) / self.kv_block
                what = f"{WAYS[way]}: the KV cache as from disk, within one block of {self.kv_block} tokens"
                self.check(what, abs(away) <= 1, seen=f"{away:+.0f} blocks of {disk // self.kv_block:,}")

    def own(self) -> None:
        """The engine's own weight cache: a start, and a start after its daemon was killed."""
        from _engine_sglang import own_daemon_command, own_environment

        environ = own_environment(self.environ(cache=False))
        with (self.folder / "own-daemon.log").open("wb") as log:
            daemon = subprocess.Popen(
                own_daemon_command(str(self.model), {}), env=environ, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self.wait_for_own(daemon)
            self.memory("SGLang's own daemon holds the weights", settled_mib(self.gpus))
            engine = self.start("own", "own")
            self.check(f"{WAYS['own']}: its log says so", "Loaded model via IPC" in engine.text)
            end_session(daemon)
            said = self.goes_on(engine)
            with self.bench.lock:
                self.bench.report.add("check", part=self.part.title, what="SGLang's own daemon killed", passed=None, seen=said)
            engine.kill()
            self.memory("SGLang's own daemon and its engine are gone", settled_mib(self.gpus))
        finally:
            end_session(daemon)

    def goes_on(self, engine: Engine) -> str:
        """What becomes of an engine in the next while: it may look after its daemon only now and then."""
        killed = time.monotonic()
        try:
            while time.monotonic() - killed < WATCHED_S:
                if engine.do(do="generate")["tokens"] != self.tokens:
                    return "the engine's answers changed"
                time.sleep(1.0)
        except (WorkerError, OSError):
            return f"the engine ended within {time.monotonic() - killed:.0f} s"
        return f"the engine goes on for {WATCHED_S:.0f} s"

    def wait_for_own(self, daemon: subprocess.Popen[bytes]) -> None:
        from _engine_sglang import OWN_READY

        deadline = time.monotonic() + 240.0
        log = self.folder / "own-daemon.log"
        while not OWN_READY.exists():
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise WorkerError(f"SGLang's own daemon did not start:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.2)

    # ---- our daemon --------------------------------------------------------------------------------------------------------

    def start_daemon(self) -> None:
        if self.closed:
            raise WorkerError("told to end")
        start_daemon(self.socket)
        with DaemonConnection.connect(self.socket) as connection:
            self.daemon_pid = connection.status().pid

    def entries_nbytes(self) -> int:
        with DaemonConnection.connect(self.socket) as connection:
            return sum(entry.nbytes for entry in connection.entries())

    def close(self) -> None:
        """Kill its engines and stop its daemon, also in the middle of a start. Idempotent."""
        self.closed = True
        for engine in self.engines:
            engine.kill()
        if self.bench.logs is not None:
            logs = sorted(self.folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
            (self.bench.logs / f"{self.name}.log").write_text(
                "".join(f"==== {path.name}\n{path.read_text(errors='replace')}\n" for path in logs)
            )
        with contextlib.suppress(DaemonError, OSError), DaemonConnection.connect(self.socket) as connection:
            connection.stop()


class Bench:
    """All parts, side by side as far as there are GPUs; each has its GPUs for itself."""

    def __init__(self, harness: Harness, engine: str, parts: dict[str, Part], gpus: list[str], logs: Path | None) -> None:
        self.harness, self.engine, self.parts, self.gpus, self.logs = harness, engine, parts, gpus, logs
        self.report = harness.report
        self.lock = threading.RLock()
        self.idle = list(gpus)
        self.given_back = threading.Condition()
        self.checkpoints: dict[tuple[str, float], Path] = {}
        self.chains: list[Chain] = []

    def run(self) -> None:
        if self.harness.on_gpu:
            self.harness.note_gpu(self.harness.work("machine", device=self.harness.device))
        wanted = dict.fromkeys((part.kind, part.gib) for part in self.parts.values())
        with ThreadPoolExecutor(len(wanted)) as pool:
            list(pool.map(lambda key: self.make(*key), wanted))
        time.sleep(SETTLED_S)
        threads = []
        try:
            for name, part in self.parts.items():
                gpus = self.take(part.tp)
                threads.append(threading.Thread(target=self.chain, args=(name, gpus)))
                threads[-1].start()
                if not self.gpus:
                    threads[-1].join()
            for thread in threads:
                thread.join()
        except BaseException:  # told to end: engines and daemons must not outlive this, nor the folder with their sockets go first
            for chain in list(self.chains):
                chain.close()
            for thread in threads:
                thread.join()
            raise
        self.set_targets()

    def take(self, count: int) -> list[str]:
        """So many GPUs, when they are idle."""
        if not self.gpus:
            return []
        with self.given_back:
            self.given_back.wait_for(lambda: len(self.idle) >= count)
            taken, self.idle = self.idle[:count], self.idle[count:]
            return taken

    def make(self, kind: str, gib: float) -> None:
        folder = self.harness.folder / f"model-{kind}-{gib:g}"
        script = Path(__file__).with_name("_engine_checkpoints.py")
        device = "cuda" if self.gpus else "cpu"
        command = [sys.executable, str(script), kind, str(folder), device, str(gib)]
        environ = {**os.environ, **({"CUDA_VISIBLE_DEVICES": self.gpus[0]} if self.gpus else {})}
        subprocess.run(command, check=True, stdout=sys.stderr, env=environ, timeout=300.0)
        self.checkpoints[kind, gib] = folder
        self.harness.say(f"made {folder.name}")

    def chain(self, name: str, gpus: list[str]) -> None:
        chain = Chain(self, name, self.parts[name], gpus)
        self.chains.append(chain)
        try:
            with self.harness.part(name), contextlib.closing(chain):
                chain.run()
        finally:
            with self.given_back:
                self.idle += gpus
                self.given_back.notify_all()

    def set_targets(self) -> None:
        checks = [row for row in self.report.rows if row["kind"] == "check" and row["passed"] is not None]
        failed = [row for row in checks if not row["passed"]]
        self.report.targets.append(Target(name=f"of {len(checks)} checks, failed", target=0, measured=len(failed), unit="checks"))


def visible_gpus() -> list[str]:
    """Numbers or UUIDs of the GPUs that this process may use."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [gpu for gpu in given.split(",") if gpu]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30.0, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return []


TABLES = [
    Table(
        kind="start",
        title="Starts, by phase",
        text="Seconds. *Weights* is the engine's own log: from asking the loader for a model until it has it. *Engine* is all of "
        "the engine's constructor, weights included. *Used* is by how much the GPU's used memory grew, in GiB.",
        columns={
            "part": "Checkpoint", "name": "Start", "weights_s": "Weights", "interpreter_s": "Interpreter", "imports_s": "Imports",
            "engine_s": "Engine", "first_token_s": "First tokens", "until_first_s": "In all", "kv_tokens": "KV cache, tokens",
            "used_gib": "Used", "same_tokens": "Same tokens", "version": "Version",
        },
    ),
    Table(
        kind="memory",
        title="Memory of the GPU in use",
        columns={"part": "Checkpoint", "when": "When", "used_gib": "GiB"},
    ),
    Table(
        kind="check",
        title="What was checked",
        columns={"part": "Checkpoint", "what": "What", "passed": "Holds", "seen": "Seen"},
    ),
]  # fmt: skip
TEXT = """\
The real engine, in fresh processes on one GPU (two ranks: on two), each start with an interpreter of its own. Checkpoints are Qwen3
with random weights, in the page cache; greedy tokens of three prompts are compared with those of the start from disk. *Large* is a
checkpoint of zeros most of the GPU's memory in size, and shows how memory is counted, not tokens. **The start from disk is the
first one on its machine**: it compiles kernels and reads the engine's packages from disk, which later starts do not. What the cache
saves is in the column *Weights*. Parts ran side by side, each on GPUs of its own."""


def suffix_of(engine: str, parts: Collection[str]) -> str:
    """Of a result's name: a run of some parts only does not replace the one of the usual ones."""
    return "_".join(["", engine, *([] if {"bf16", "fp8", "large"} <= set(parts) else parts)])


def sections(result: dict[str, Any]) -> str:
    options = result["options"]
    title = {"vllm": "Starts of vLLM", "sglang": "Starts of SGLang"}[options["engine"]]
    if suffix_of(options["engine"], options["parts"]) != f"_{options['engine']}":
        title += f": {', '.join(options['parts'])}"
    by_part = sorted(result["rows"], key=lambda row: row.get("part", ""))  # they were running side by side
    return _report.section({**result, "rows": by_part}, title=title, text=TEXT, tables=TABLES)


def write_docs(result: dict[str, Any], page: Path = _report.PAGE) -> None:
    options = result["options"]
    name = NAME + suffix_of(options["engine"], options["parts"])
    page.write_text(_report.replace_section(page.read_text(), name, sections(result)))


def main() -> None:
    args = _cuda_harness.arguments(__doc__)
    args.add_argument("engine", choices=sorted(WORKERS))
    args.add_argument("--parts", help="which parts, by commas (default: all that there are GPUs for)")
    args.add_argument("--logs", type=Path, help="a folder for what the engines wrote, one file a part")
    options = args.parse_args()
    on_gpu = options.device != "cpu"
    gpus = visible_gpus() if on_gpu else []
    parts = parts_for(options.engine, on_gpu=on_gpu, small=options.quick)
    wanted = options.parts.split(",") if options.parts else [name for name, part in parts.items() if part.tp <= max(1, len(gpus))]
    chosen = {name: parts[name] for name in wanted}
    _cuda_harness.run(
        NAME, options, lambda harness: Bench(harness, options.engine, chosen, gpus, options.logs).run(), TABLES, write_docs,
        suffix=suffix_of(options.engine, wanted), engine=options.engine, parts=wanted,
    )  # fmt: skip


if __name__ == "__main__":
    main()
