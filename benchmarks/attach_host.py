"""How long a start takes on host memory: attaching a published module, against loading it, in one run.

    python benchmarks/attach_host.py [--quick] [--out FILE] [--dir FOLDER] [--docs]

Every measurement is a process of its own, with its imports done before the clock starts, the checkpoint in the page cache, and a
daemon of the benchmark's own. ``--docs`` also rewrites this benchmark's part of docs/benchmarks.md from the JSON; with
``--docs-only`` nothing is measured. Needs twice the largest size (8 GiB) in memory and on disk, a tenth of that with ``--quick``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _report
from _report import Report, Table, Target, spread

from torchwcache.daemon.supervisor import start_daemon
from torchwcache.errors import DaemonError
from torchwcache.wire.client import DaemonConnection

NAME = Path(__file__).stem
MIB, GIB = 1 << 20, 1 << 30
WORKER = Path(__file__).with_name("_start_worker.py")
STEP_TIMEOUT_S = 900.0
SETTLED_S = 2.5
"""Only files that were last touched longer ago than two seconds have an identity that can be remembered."""
IMPORT_CODE = (
    "import time; a = time.perf_counter(); import torchwcache; b = time.perf_counter(); "
    "torchwcache.ModelConfig, torchwcache.WeightCache; print(b - a, time.perf_counter() - a)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    sizes: tuple[int, ...]
    """Bytes, with ``tensors`` tensors."""
    counts: tuple[int, ...]
    """Tensors, with ``sizes[0]`` bytes."""
    tensors: int
    llamas: tuple[int, ...]
    hits: int
    loads: int
    small: int


FULL = Plan(sizes=(GIB, 4 * GIB, 8 * GIB), counts=(100, 20_000), tensors=2_000, llamas=(GIB, 4 * GIB), hits=5, loads=3, small=15)
QUICK = Plan(sizes=(64 * MIB, 256 * MIB), counts=(100,), tensors=2_000, llamas=(64 * MIB,), hits=2, loads=1, small=3)


class Bench:
    """A private folder, a daemon in it, and the processes that measure."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.report = Report(NAME)
        self.socket = str(folder / "run" / "daemon.sock")
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHWCACHE_")}
        self.environ |= {"TORCHWCACHE_SOCKET": self.socket, "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        self.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self.first_load_s: dict[int, float] = {}

    # ---- tools -------------------------------------------------------------------------------------------------------------

    def work(self, function: str, /, *, cache: Path | None = None, **arguments: Any) -> dict[str, Any]:
        """Run one function of the worker in a fresh process."""
        environ = self.environ | ({"XDG_CACHE_HOME": str(cache)} if cache is not None else {})
        command = [sys.executable, str(WORKER), function, json.dumps(arguments)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{function} failed:\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

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

    def daemon_rss_nbytes(self) -> int:
        with DaemonConnection.connect(self.socket) as connection:
            status = Path(f"/proc/{connection.status().pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    @contextlib.contextmanager
    def checkpoint(self, name: str) -> Iterator[Path]:
        folder = self.folder / name
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    # ---- starts ------------------------------------------------------------------------------------------------------------

    def stack(self, tensors: int, nbytes: int) -> None:
        """One plain module: loaded in the usual ways, published, attached."""
        kwargs = self.work("stack_kwargs", tensors=tensors, nbytes=nbytes)
        what = {"model": "plain", "gib": nbytes / GIB, "tensors": tensors}
        with self.checkpoint("torch") as folder:
            self.work("make_stack", folder=str(folder), kwargs=kwargs, form="torch")
            self.loads(what, "torch.load(mmap) + assign", "torch_load", folder, kwargs=kwargs)
        with self.checkpoint("stack") as folder:
            self.work("make_stack", folder=str(folder), kwargs=kwargs, form="safetensors")
            self.loads(what, "safetensors load_file + assign", "load_file", folder, kwargs=kwargs)
            if (tensors, nbytes) == (self.plan.tensors, self.plan.sizes[0]):
                self.hashing(what, folder, kwargs)
            self.hits(what, folder, kwargs)

    def llama(self, nbytes: int) -> None:
        """One Transformers model: from_pretrained, published, attached."""
        with self.checkpoint("llama") as folder:
            self.work("make_llama", folder=str(folder), nbytes=nbytes)
            what = {"model": "Llama", "gib": nbytes / GIB, "tensors": None}
            self.loads(what, "from_pretrained", "from_pretrained", folder)
            self.hits(what, folder, None)

    def loads(self, what: dict[str, Any], way: str, function: str, folder: Path, **arguments: Any) -> None:
        runs = []
        for _ in range(self.plan.loads):
            read_all(folder)
            runs.append(self.work(function, folder=str(folder), **arguments))
        self.start_row(what, way, runs)

    def hits(self, what: dict[str, Any], folder: Path, kwargs: dict[str, int] | None) -> None:
        time.sleep(SETTLED_S)
        read_all(folder)
        produced = self.work("attach", folder=str(folder), kwargs=kwargs)
        assert produced["source"] == "disk", produced
        self.report.add("first load", **what, ready_ms=ms(produced["ready_s"]), seconds=produced["seconds"])
        runs = [self.work("attach", folder=str(folder), kwargs=kwargs) for _ in range(self.plan.hits)]
        assert all(run["source"] == "cache" for run in runs), runs
        what = what | {"tensors": runs[0]["tensors"]}
        self.start_row(what, "attach", runs)
        self.hit_row(what, runs)
        with_entry = self.daemon_rss_nbytes()
        self.report.add("daemon", **what, rss_mb=with_entry / 1e6)
        self.evict()

    def start_row(self, what: dict[str, Any], way: str, runs: Sequence[dict[str, Any]]) -> None:
        built = runs[0]["build_s"] is not None
        values = {
            "build_ms": [ms(run["build_s"]) for run in runs] if built else None,
            "rest_ms": [ms(run["ready_s"] - (run["build_s"] or 0.0)) for run in runs],
            "first_forward_ms": [ms(run["first_forward_s"]) for run in runs],
            "second_forward_ms": [ms(run["second_forward_s"]) for run in runs],
            "until_output_ms": [ms(run["ready_s"] + run["first_forward_s"]) for run in runs],
        }
        self.row("start", {**what, "way": way}, values)

    def hit_row(self, what: dict[str, Any], runs: Sequence[dict[str, Any]]) -> None:
        phases = ("fingerprint", "connect", "wait", "map", "rebind")
        values: dict[str, Any] = {f"{name}_ms": [ms(run["seconds"][name]) for run in runs] for name in phases}
        tensors = runs[0]["tensors"]
        placed = [run["seconds"]["map"] + run["seconds"]["rebind"] for run in runs]
        beyond = [run["ready_s"] - run["build_s"] for run in runs]
        round_trip = [run["seconds"]["connect"] + run["seconds"]["wait"] for run in runs]
        values |= {
            "round_trip_ms": [ms(value) for value in round_trip],
            "placed_ms": [ms(value) for value in placed],
            "beyond_ms": [ms(value) for value in beyond],
            "placed_us_per_tensor": [value / tensors * 1e6 for value in placed],
            "beyond_us_per_tensor": [value / tensors * 1e6 for value in beyond],
            "all_us_per_tensor": [run["ready_s"] / tensors * 1e6 for run in runs],
        }
        nbytes = {"mapped_gib": runs[0]["mapped_nbytes"] / GIB, "copied_nbytes": runs[0]["copied_nbytes"]}
        self.row("hit", {**what, **nbytes}, values)

    def row(self, kind: str, what: dict[str, Any], values: dict[str, Sequence[float] | None]) -> None:
        """The medians as they are; the least of each beside them."""
        found = {key: spread(value) if value is not None else None for key, value in values.items()}
        medians = {key: value["median"] if value is not None else None for key, value in found.items()}
        least = {key: value["min"] for key, value in found.items() if value is not None}
        repeats = next(value["repeats"] for value in found.values() if value is not None)
        self.report.add(kind, **what, **medians, least=least, repeats=repeats)
        self.say("  " + ", ".join(f"{key} {_report.shown(value)}" for key, value in ({**what, **medians}).items()))

    # ---- the rest ----------------------------------------------------------------------------------------------------------

    def hashing(self, what: dict[str, Any], folder: Path, kwargs: dict[str, int]) -> None:
        """First loads with the checkpoint's hash to be established in the background, and with the hash remembered."""
        time.sleep(SETTLED_S)
        known = self.folder / "cache-known"
        self.work("attach", cache=known, folder=str(folder), kwargs=kwargs)
        for state, prepare in (("in the page cache", read_all), ("on disk", forget_all)):
            seconds: dict[str, list[float]] = {"hashed": [], "remembered": []}
            for number in range(self.plan.loads + 1):
                for how in sorted(seconds, reverse=number % 2 == 0):
                    fresh = self.folder / f"cache-fresh-{number}"
                    self.evict()
                    prepare(folder)
                    found = self.work("attach", cache=known if how == "remembered" else fresh, folder=str(folder), kwargs=kwargs)
                    assert found["source"] == "disk", found
                    seconds[how].append(found["ready_s"] - found["build_s"])
                    shutil.rmtree(fresh, ignore_errors=True)
            values = {f"{how}_ms": [ms(value) for value in found] for how, found in seconds.items()}
            self.row("hashing", {**what, "files": state}, values)
        self.evict()

    def small_things(self) -> None:
        times = range(self.plan.small)
        self.say("imports, daemon, remembered files")
        imports = [self.python(IMPORT_CODE) for _ in times]
        names = ("import torchwcache", "import torchwcache, and reach for ModelConfig and WeightCache")
        for i, name in enumerate(names):
            self.row("small", {"what": name}, {"ms": [ms(run[i]) for run in imports]})
        ready = [self.work("start_daemon", socket=str(self.folder / "other" / "daemon.sock")) for _ in times]
        self.row(
            "small", {"what": "start of a daemon, until it can be connected to"}, {"ms": [ms(run["ready_s"]) for run in ready]}
        )
        with self.checkpoint("small") as folder:
            self.work("make_small_files", folder=str(folder), count=100)
            time.sleep(SETTLED_S)
            self.work("remembered", folder=str(folder))
            runs = [self.work("remembered", folder=str(folder)) for _ in times]
        assert all(run["known"] and run["files"] == 100 for run in runs), runs
        self.row("small", {"what": "identity of 100 files, remembered"}, {"ms": [ms(run["seconds"]) for run in runs]})

    def python(self, code: str) -> list[float]:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=True)
        return [float(word) for word in done.stdout.split()]

    # ---- all of it -----------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        plan = self.plan
        self.small_things()
        with self.daemon():
            self.report.add("daemon", model="nothing", gib=0.0, tensors=0, rss_mb=self.daemon_rss_nbytes() / 1e6)
            for tensors, nbytes in [*((plan.tensors, size) for size in plan.sizes), *((n, plan.sizes[0]) for n in plan.counts)]:
                self.say(f"plain, {nbytes / GIB:g} GiB in {tensors} tensors")
                self.stack(tensors, nbytes)
            for nbytes in plan.llamas:
                self.say(f"Llama, {nbytes / GIB:g} GiB")
                self.llama(nbytes)
        self.set_targets()

    def set_targets(self) -> None:
        report, plan = self.report, self.plan
        hits = [row for row in report.rows if row["kind"] == "hit" and row["model"] == "plain"]
        usual = next(row for row in hits if row["tensors"] == plan.tensors)
        by_size = [row for row in hits if row["tensors"] == plan.tensors]
        small = {row["what"]: row["ms"] for row in report.rows if row["kind"] == "small"}
        n = f"{plan.tensors:,} tensors"

        def target(name: str, most: float, measured: float, unit: str) -> None:
            report.targets.append(Target(name=name, target=most, measured=measured, unit=unit))

        target(f"hit, {n}: connect and round trip", 3.0, usual["round_trip_ms"], "ms")
        target(f"hit, {n}: map and rebind", 3.0, usual["placed_ms"], "ms")
        target(f"hit, {n}: everything beyond building the module", 3.0, usual["beyond_ms"], "ms")
        for row in sorted(hits, key=lambda row: row["tensors"]):
            if row["gib"] == usual["gib"]:
                where = f"{row['tensors']:,} tensors"
                target(f"per tensor of {where}: map and rebind", 15.0, row["placed_us_per_tensor"], "us")
                target(f"per tensor of {where}: everything beyond building", 15.0, row["beyond_us_per_tensor"], "us")
        target(f"per tensor of {n}: everything, building the module too", 15.0, usual["all_us_per_tensor"], "us")
        sizes = " / ".join(f"{size / GIB:g}" for size in plan.sizes)
        # Other work on the machine only ever adds, and differently to each side: ratios of the least times are given, too.
        for which, times in (("medians", by_size), ("least times", [row["least"] for row in by_size])):
            ratio = max(row["beyond_ms"] for row in times) / min(row["beyond_ms"] for row in times)
            target(f"longest by shortest attach of {sizes} GiB, beyond building ({which})", 1.3, ratio, "times")
        target("memory of the daemon (RSS)", 40.0, max(row["rss_mb"] for row in report.rows if row["kind"] == "daemon"), "MB")
        target("start of the daemon", 200.0, small["start of a daemon, until it can be connected to"], "ms")
        target("import torchwcache", 50.0, small["import torchwcache"], "ms")
        target("identity of 100 files, remembered", 20.0, small["identity of 100 files, remembered"], "ms")
        for row in report.rows:
            if row["kind"] == "hashing":
                for which, times in (("medians", row), ("least times", row["least"])):
                    added = (times["hashed_ms"] / times["remembered_ms"] - 1) * 100
                    target(f"first load, files {row['files']}: added by hashing ({which})", 10.0, added, "%")


def ms(seconds: float) -> float:
    return seconds * 1e3


def read_all(folder: Path) -> None:
    """Bring a checkpoint into the page cache."""
    buffer = bytearray(4 * MIB)
    for path in folder.iterdir():
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def forget_all(folder: Path) -> None:
    """Ask the kernel to drop a checkpoint from the page cache."""
    for path in folder.iterdir():
        with open(path, "rb", buffering=0) as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


WHAT = {"model": "Model", "gib": "GiB", "tensors": "Tensors"}
TABLES = [
    Table(
        kind="hit",
        title="An attach, phase by phase",
        text="Milliseconds; the last two columns are microseconds for each tensor. *Beyond building* is all of the call but the "
        "time in which PyTorch builds the module on the meta device.",
        columns={
            **WHAT, "fingerprint_ms": "Fingerprint", "connect_ms": "Connect", "wait_ms": "Round trip", "map_ms": "Map",
            "rebind_ms": "Rebind", "beyond_ms": "Beyond building", "mapped_gib": "GiB mapped", "copied_nbytes": "Bytes copied",
            "placed_us_per_tensor": "Map and rebind, us", "beyond_us_per_tensor": "Beyond building, us",
        },
    ),
    Table(
        kind="start",
        title="Against loading",
        text="Milliseconds. *Rest* is what a start takes beyond building the module; `from_pretrained` does not tell them apart. "
        "All files are in the page cache, which is the best case for loading. **First forward** contains the page faults of the "
        "first touch of every mapped page, which attaching leaves to it, as every way that maps files does; the second forward has "
        "none (both on one thread). What a user waits for is *until the first output*.",
        columns={
            **WHAT, "way": "Way", "build_ms": "Build", "rest_ms": "Rest", "first_forward_ms": "First forward",
            "second_forward_ms": "Second forward", "until_output_ms": "Until the first output",
        },
    ),
    Table(
        kind="hashing",
        title="What hashing adds to a first load",
        text="Milliseconds beyond building, of a first load that publishes: once with the checkpoint's hash to be established in "
        "the background, once with the hash remembered.",
        columns={**WHAT, "files": "Files", "hashed_ms": "Hashed", "remembered_ms": "Remembered"},
    ),
    Table(kind="daemon", title="The daemon's memory", columns={**WHAT, "rss_mb": "RSS, MB"}, text="While it holds one entry:"),
    Table(kind="small", title="Small things", columns={"what": "What", "ms": "Milliseconds"}),
]  # fmt: skip
TEXT = """\
A published module is attached by a fresh process, which then runs two forwards; the same module is loaded in the usual ways. Every
measurement is a process of its own, with its imports done before the clock starts. Numbers are medians; the JSON, which is
`benchmarks/results/attach_host.json`, has the least of each beside them. The plain module is a stack of square matrices and vectors
whose forward reads every weight once; the Llama is made from a config, with random weights."""
INTRO = """\
# Benchmarks

Each benchmark is one script in `benchmarks/`. Its JSON has the machine, the versions, every row, and every target with what was
measured; a target that was missed stays visible. What follows is written by the scripts from these files: no number here was
typed by hand."""


def section(result: dict[str, Any]) -> str:
    """This benchmark's part of docs/benchmarks.md."""
    return _report.section(result, title="Attaching on host memory", text=TEXT, tables=TABLES)


def write_docs(result: dict[str, Any], page: Path = _report.PAGE) -> None:
    text = page.read_text() if page.exists() else INTRO
    page.write_text(_report.replace_section(text, NAME, section(result)))


@contextlib.contextmanager
def working_folder(parent: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="torchwcache-bench-", dir=parent) as name:
        yield Path(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats: shows that it works, not how fast it is")
    parser.add_argument("--out", type=Path, help="where the JSON goes (default: benchmarks/results/, nowhere with --quick)")
    parser.add_argument("--dir", type=Path, help="where checkpoints and the daemon's socket live meanwhile")
    parser.add_argument("--docs", action="store_true", help="write docs/benchmarks.md from the result")
    parser.add_argument("--docs-only", action="store_true", help="write docs/benchmarks.md from the last result; measure nothing")
    args = parser.parse_args()
    out = args.out or (None if args.quick else _report.RESULTS / f"{NAME}.json")
    if args.docs_only:
        write_docs(json.loads((out or _report.RESULTS / f"{NAME}.json").read_text()))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that what follows is cleaned up then, too
    with working_folder(args.dir) as folder:
        bench = Bench(folder, QUICK if args.quick else FULL)
        bench.run()
    result = bench.report.as_dict(complete=not args.quick, options={"quick": args.quick})
    print(_report.tables_text(result, TABLES, heading="#"))
    if out is not None:
        _report.write(out, result)
    if args.docs:
        write_docs(result)


if __name__ == "__main__":
    main()
