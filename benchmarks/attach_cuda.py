"""How long an attach takes on GPU memory: torchwcache, torch CUDA IPC with a handle per tensor, and the floor, in one run.

    python benchmarks/attach_cuda.py [--device cuda|cpu] [--quick] [--out FILE] [--dir FOLDER] [--docs | --docs-only]

The module is made on the GPU and published by one process, then attached by fresh ones. Sides take turns where the memory of all
fits; else they follow each other. Every client checks what it got, after the clock. Needs 135 GiB of GPU memory; about six minutes
on an H200.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _cuda_harness
import _report
from _cuda_harness import GIB, MIB, VARIANT, Harness, Worker, ms
from _report import Table, Target

NAME = Path(__file__).stem
WIDTH = 1024
EARLY_NBYTES = 100 * GIB
"""What leaves room for the contexts of the waiting clients while it is made and published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A module to attach."""

    nbytes: int
    tensors: int
    repeats: int

    @property
    def kwargs(self) -> dict[str, int]:
        """Of ``_cuda_models.Stack``; as there, but without torch."""
        return {"count": self.tensors, "rows": max(1, round(self.nbytes / self.tensors / 2 / WIDTH)), "width": WIDTH}

    @property
    def what(self) -> dict[str, Any]:
        return {"gib": self.nbytes / GIB, "tensors": self.tensors}

    def __str__(self) -> str:
        size = f"{self.nbytes / GIB:g} GiB" if self.nbytes >= GIB else f"{self.nbytes / MIB:g} MiB"
        return f"{size} in {self.tensors:,} tensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured: by size, by number of tensors; the case that the targets are about; and what is computed with."""

    sizes: tuple[Case, ...]
    counts: tuple[Case, ...]
    main: Case
    compute: dict[str, int]
    rounds: int


def plan_for(*, on_gpu: bool, quick: bool) -> Plan:
    if not on_gpu:
        sizes = tuple(Case(nbytes=nbytes, tensors=200, repeats=2) for nbytes in (16 * MIB, 64 * MIB))
        counts = (Case(nbytes=16 * MIB, tensors=20, repeats=1), Case(nbytes=16 * MIB, tensors=2_000, repeats=2))
        return Plan(sizes=sizes, counts=counts, main=sizes[-1], compute={"count": 4, "rows": 256, "width": 256}, rounds=3)
    if quick:
        sizes = tuple(Case(nbytes=nbytes * GIB, tensors=2_000, repeats=2) for nbytes in (2, 8))
        counts = (Case(nbytes=GIB, tensors=100, repeats=2), Case(nbytes=2 * GIB, tensors=20_000, repeats=2))
        return Plan(sizes=sizes, counts=counts, main=sizes[-1], compute={"count": 16, "rows": 8192, "width": 8192}, rounds=6)
    sizes = tuple(Case(nbytes=nbytes * GIB, tensors=2_000, repeats=3 if nbytes == 130 else 5) for nbytes in (10, 50, 100, 130))
    counts = tuple(Case(nbytes=10 * GIB, tensors=n, repeats=5) for n in (100, 20_000, 92_000))
    return Plan(sizes=sizes, counts=counts, main=sizes[2], compute={"count": 72, "rows": 8192, "width": 8192}, rounds=15)


SIDES = ("ours", "floor", "ipc")


@dataclass(slots=True)
class Side:
    """One way to get at the memory of another process: who has it, and fresh processes that get it."""

    name: str
    server: Worker
    clients: list[Worker]
    start: Callable[[], Worker]
    runs: list[dict[str, Any]] = field(default_factory=list)

    def prepare(self, clients: int) -> None:
        """Have the memory made, and so many fresh processes ready."""
        self.server.ready()
        said = self.server.step()
        assert said.get("published", True), said
        while len(self.clients) < clients:  # there was no room for their contexts beside the making of the memory
            self.clients.append(self.start())
        for client in self.clients:
            client.ready()

    def measure(self, number: int) -> None:
        """One fresh process, to its end."""
        self.runs.append(self.clients[number].step())
        self.clients[number].close()


def speeds(runs: Sequence[dict[str, Any]]) -> dict[str, Sequence[float]]:
    """How fast the machine ran a fixed piece of Python, before and after each measurement."""
    return {name: [run[name] for run in runs] for name in ("python_ms", "python_after_ms")}


class Bench:
    """The cases, one after the other."""

    def __init__(self, harness: Harness, plan: Plan) -> None:
        self.harness, self.plan, self.report = harness, plan, harness.report
        self.rows: dict[Case, dict[str, Any]] = {}

    def run(self) -> None:
        plan = self.plan
        self.harness.work("make_checkpoint", folder=str(self.harness.folder))
        with self.harness.daemon():
            for case in (*plan.counts[:1], *plan.sizes, *plan.counts[1:]):
                with self.harness.part(str(case)):
                    self.case(case)
            with self.harness.part("computing with attached weights"):
                self.compute()
        self.set_targets()

    def case(self, case: Case) -> None:
        """All sides of a case. Their processes start side by side, which takes longer than all else; they measure one by one.

        Where the memory of all sides fits, they do so by turns: a machine that is slower for a while is slower for all of them.
        """
        names = SIDES if self.harness.on_gpu else SIDES[:2]
        with contextlib.ExitStack() as stack:
            early = case.nbytes <= EARLY_NBYTES
            sides = [self.side(name, case, stack, clients=case.repeats if early else 0) for name in names]
            for worker in (worker for side in sides for worker in (side.server, *side.clients)):
                self.harness.note_gpu(worker.ready())  # whoever still imports takes time from whoever is measured
            rows: dict[str, dict[str, Any]] = {}
            for together in [sides] if len(sides) * case.nbytes <= EARLY_NBYTES else [[side] for side in sides]:
                for side in together:
                    side.prepare(case.repeats)
                for number in range(case.repeats):
                    for side in together:
                        side.measure(number)
                rows |= {side.name: self.finish(side, case) for side in together}
        ours, floor = rows["ours"], rows["floor"]
        row = {key: ours[key] for key in ("placed_ms", "us_per_tensor")}
        row |= {"least_ms": ours["least"]["placed_ms"], "floor_ms": floor["placed_ms"]}
        if "ipc" in rows:
            row |= {"ipc_ms": rows["ipc"]["placed_ms"], "times": rows["ipc"]["placed_ms"] / ours["placed_ms"]}
        self.rows[case] = self.report.add("case", **case.what, **row)

    def side(self, name: str, case: Case, stack: contextlib.ExitStack, *, clients: int) -> Side:
        server, client = {"ours": ("publish", "attach")}.get(name, (f"{name}_serve", f"{name}_attach"))
        same = self.arguments(server, case)
        if "socket_path" in same:
            Path(same["socket_path"]).unlink(missing_ok=True)

        def start(function: str) -> Worker:
            return stack.enter_context(self.harness.worker(function, **same))

        return Side(name, start(server), [start(client) for _ in range(clients)], lambda: start(client))

    def finish(self, side: Side, case: Case) -> dict[str, Any]:
        if side.name == "ours":
            return self.ours(side, case)
        phases = {"floor": ("receive", "map", "views"), "ipc": ("receive", "open", "assign")}[side.name]
        side.server.close()
        values = {f"{name}_ms": [ms(run[f"{name}_s"]) for run in side.runs] for name in (*phases, "placed")}
        values["us_per_tensor"] = [run["placed_s"] / case.tensors * 1e6 for run in side.runs]
        return self.harness.row(side.name, case.what, values | speeds(side.runs))

    def arguments(self, server: str, case: Case) -> dict[str, Any]:
        harness = self.harness
        same: dict[str, Any] = {"kwargs": case.kwargs, "device": harness.device}
        if server == "publish":
            return {**same, "folder": str(harness.folder), "variant": VARIANT}
        return {**same, "socket_path": str(harness.folder / f"{server.removesuffix('_serve')}.sock")}

    def ours(self, side: Side, case: Case) -> dict[str, Any]:
        harness, runs = self.harness, side.runs
        facts = harness.daemon_facts(side.server.process.pid)
        side.server.close()
        harness.evict()
        assert all(run["tensors"] == case.tensors for run in runs), runs
        phases = ("fingerprint", "connect", "wait", "map", "rebind")
        values: dict[str, Sequence[float]] = {f"{name}_ms": [ms(run["seconds"][name]) for run in runs] for name in phases}
        placed = [sum(run["seconds"][name] for name in phases[1:]) for run in runs]
        values |= {
            "placed_ms": [ms(value) for value in placed],
            "us_per_tensor": [value / case.tensors * 1e6 for value in placed],
            "build_ms": [ms(run["seconds"]["build"]) for run in runs],
            "all_ms": [ms(run["ready_s"]) for run in runs],
        }
        first = runs[0]
        more = {"mapped_gib": first["mapped_nbytes"] / GIB, "copied_nbytes": first["copied_nbytes"]}
        more["same_addresses"] = None if first["same_addresses"] is None else all(run["same_addresses"] for run in runs)
        row = harness.row("hit", {**case.what, **more, "segments": facts["segments"]}, values | speeds(runs))
        self.report.add("daemon", **case.what, **facts)
        return row

    def compute(self) -> None:
        harness, plan = self.harness, self.plan
        same = {"folder": str(harness.folder), "kwargs": plan.compute, "device": harness.device, "variant": VARIANT}
        with harness.worker("publish", **same, random=True) as producer:

            def prepare() -> None:
                producer.step()
                producer.step()

            found = harness.measured("compute", prepare, **same, rounds=plan.rounds)
        harness.evict()
        names = {
            "read": "sum over all weights",
            "decode": "one matrix-vector product with each weight",
            "matmul": f"products of {plan.compute['rows']} x {plan.compute['width']} matrices",
        }
        for key, name in names.items():
            work = found["works"][key]
            middle = {which: _report.spread(seconds)["median"] for which, seconds in work["seconds"].items()}
            rates = {which: work["amount"] / value for which, value in middle.items()}
            self.report.add(
                "compute", work=key, name=name, gib=found["gib"], **rates, unit=work["unit"], equal=work["equal"],
                ratio=middle["attached"] / middle["ordinary"], control_ratio=middle["control"] / middle["ordinary"],
                repeats=plan.rounds, seconds=work["seconds"],
            )  # fmt: skip
            harness.say(f"  {name}: {rates}")

    # ---- targets -----------------------------------------------------------------------------------------------------------

    def set_targets(self) -> None:
        plan, rows = self.plan, self.rows

        def target(name: str, value: float, measured: float, unit: str, *, at_least: bool = False) -> None:
            self.report.targets.append(Target(name=name, target=value, measured=measured, unit=unit, at_least=at_least))

        for case, key, most, unit, name, least in (
            (plan.main, "placed_ms", 13.0, "ms", "connect to rebound module", 15.0),
            (plan.counts[-1], "us_per_tensor", 8.0, "us", "connect to rebound module, per tensor", 10.0),
        ):
            if case in rows:
                target(f"{case}: {name}", most, rows[case][key], unit)
                if "times" in rows[case]:
                    target(f"{case}: torch CUDA IPC takes", least, rows[case]["times"], "times as long", at_least=True)
        sizes = [case for case in plan.sizes if case in rows]
        if sizes:
            names = " / ".join(f"{case.nbytes / GIB:g}" for case in sizes)
            what = f"longest by shortest of {names} GiB in {sizes[0].tensors:,} tensors"
            # Sizes are measured minutes apart, and a machine's slow moments only ever add: the least says what the size makes.
            for how, key in (("by medians", "placed_ms"), ("by the least of each", "least_ms")):
                found = [rows[case][key] for case in sizes]
                target(f"{what}, {how}", 1.3, max(found) / min(found), "times")
        for row in self.report.rows:
            if row["kind"] == "compute":
                target(f"{row['name']}: time with attached by ordinary weights", 1.03, row["ratio"], "times")
        segments = [row["fds"] - row["segments"] for row in self.report.rows if row["kind"] == "daemon"]
        if segments:
            target("descriptors of the daemon beyond one per segment", 32.0, max(segments), "descriptors")
        contexts = [row["gpu_contexts"] for row in self.report.rows if row["kind"] == "daemon" and row["gpu_contexts"] is not None]
        if contexts:
            target("CUDA contexts of the daemon", 0.0, max(contexts), "contexts")


WHAT = {"gib": "GiB", "tensors": "Tensors"}
TABLES = [
    Table(
        kind="case",
        title="Against torch CUDA IPC and the floor",
        text="From connecting to a module with all its tensors, in milliseconds; building the module apart. The floor makes one "
        "mapping and bare views of it, and has no module.",
        columns={
            **WHAT, "placed_ms": "torchwcache", "ipc_ms": "torch CUDA IPC", "times": "Times as long", "floor_ms": "Floor",
            "us_per_tensor": "torchwcache, us a tensor",
        },
    ),
    Table(
        kind="hit",
        title="An attach on GPU memory, phase by phase",
        text="Milliseconds. *Placed* is connect, round trip, map and rebind.",
        columns={
            **WHAT, "segments": "Segments", "fingerprint_ms": "Fingerprint", "connect_ms": "Connect", "wait_ms": "Round trip",
            "map_ms": "Map", "rebind_ms": "Rebind", "placed_ms": "Placed", "build_ms": "Build", "all_ms": "The whole call",
            "same_addresses": "At the producer's addresses", "python_ms": "Python", "python_after_ms": "Python, after",
        },
    ),
    Table(
        kind="ipc",
        title="torch CUDA IPC, phase by phase",
        text="Milliseconds: receive all handles in one message, open each, put each tensor into the module.",
        columns={
            **WHAT, "receive_ms": "Receive", "open_ms": "Open", "assign_ms": "Assign", "placed_ms": "Placed",
            "us_per_tensor": "us a tensor", "python_ms": "Python", "python_after_ms": "Python, after",
        },
    ),
    Table(
        kind="floor",
        title="The floor, phase by phase",
        text="Milliseconds: receive one descriptor, map it once, make the views.",
        columns={
            **WHAT, "receive_ms": "Receive", "map_ms": "Map", "views_ms": "Views", "placed_ms": "Placed",
            "us_per_tensor": "us a tensor", "python_ms": "Python", "python_after_ms": "Python, after",
        },
    ),
    Table(
        kind="compute",
        title="Computing with attached weights",
        text="In one process, by turns: with attached weights, with a copy in ordinary memory, and with a second such copy, the "
        "*control*. The last two columns are times, by that of the first copy.",
        columns={
            "name": "What", "gib": "GiB", "attached": "Attached", "ordinary": "Ordinary", "control": "Control", "unit": "Unit",
            "equal": "Equal output", "ratio": "Attached, times", "control_ratio": "Control, times",
        },
    ),
    Table(
        kind="daemon",
        title="The daemon, while it holds GPU memory",
        text="*CUDA contexts*: whether the driver lists it among the processes that use the GPU; empty where the driver lists "
        "none.",
        columns={**WHAT, "segments": "Segments", "fds": "Open descriptors", "gpu_contexts": "CUDA contexts", "rss_mb": "RSS, MB"},
    ),
]  # fmt: skip
TEXT = """\
A module of equal bfloat16 matrices, each in a submodule of its own, is made on the GPU, published, and attached by fresh processes,
with their imports and their CUDA context done before the clock starts. The other side is torch's own CUDA IPC with one handle per
tensor, the transport of the weight caches of SGLang and vLLM, written as SGLang 0.5.23 does it: each tensor pickled by
`ForkingPickler`, all of them in one message over a Unix socket, each rebuilt and assigned. Every client compares what it got with
what was published, after the clock. Up to 30 GiB the sides take turns, process by process, so that all of them see the machine as
it is just then; beyond, the memory of all of them does not fit. *Python* is the time of a fixed piece of Python, right before and
right after. Numbers are medians; the JSON, which is `benchmarks/results/attach_cuda.json`, has every single one."""


def section(result: dict[str, Any]) -> str:
    """This benchmark's part of docs/benchmarks.md."""
    return _report.section(result, title="Attaching on GPU memory", text=TEXT, tables=TABLES)


def write_docs(result: dict[str, Any], page: Path = _report.PAGE) -> None:
    page.write_text(_report.replace_section(page.read_text(), NAME, section(result)))


def main() -> None:
    args = _cuda_harness.arguments(__doc__)
    options = args.parse_args()
    plan = plan_for(on_gpu=options.device != "cpu", quick=options.quick)
    _cuda_harness.run(NAME, options, lambda harness: Bench(harness, plan).run(), TABLES, write_docs)


if __name__ == "__main__":
    main()
