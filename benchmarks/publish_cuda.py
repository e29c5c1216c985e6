"""How fast a module is packed into GPU memory that outlives its process, and how much memory that takes beside it.

    python benchmarks/publish_cuda.py [--device cuda|cpu] [--quick] [--out FILE] [--dir FOLDER] [--docs | --docs-only]

Each case is a fresh process that makes the module on the GPU and publishes it, several times over: for the time, and once more for
the memory, which takes time to look at. Needs 110 GiB of GPU memory; about two minutes on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _cuda_harness
import _report
from _cuda_harness import GIB, MIB, Harness, ms
from _report import Table, Target
from attach_cuda import Case

NAME = Path(__file__).stem


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The targets are about the last case."""

    cases: tuple[Case, ...]


def plan_for(*, on_gpu: bool, quick: bool) -> Plan:
    sizes, counts, repeats = (10 * GIB, 50 * GIB, 100 * GIB), (25, 100, 2_000), 3
    if quick:
        sizes, repeats = (GIB, 4 * GIB), 2
    if not on_gpu:
        sizes, counts, repeats = (64 * MIB, 256 * MIB), (20, 200), 2
    return Plan(cases=tuple(Case(nbytes=nbytes, tensors=n, repeats=repeats) for nbytes in sizes for n in counts))


class Bench:
    """The cases, one after the other."""

    def __init__(self, harness: Harness, plan: Plan) -> None:
        self.harness, self.plan, self.report = harness, plan, harness.report

    def run(self) -> None:
        self.harness.work("make_checkpoint", folder=str(self.harness.folder))
        with self.harness.daemon():
            for case in self.plan.cases:
                with self.harness.part(str(case)):
                    self.case(case)
        if self.harness.on_gpu:
            with self.harness.part("copying while memory is freed"):
                for nbytes, count in ((GIB, 40), (50 * MIB, 800)):
                    self.beside(nbytes, count)

    def case(self, case: Case) -> None:
        harness = self.harness
        same = {"folder": str(harness.folder), "kwargs": case.kwargs, "device": harness.device, "timed": case.repeats}
        with (
            harness.worker("publish_rounds", **same) as worker,
            harness.worker("publish_floor", kwargs=case.kwargs, device=harness.device, timed=case.repeats) as driver,
        ):
            harness.note_gpu(worker.step())
            driver.step()
            runs, floor = [], []
            for _ in range(case.repeats):  # by turns: both sides see the machine as fast as it is just then
                runs.append(worker.step())
                floor.append(driver.step())
            memory = worker.step()  # the other side stays: what it has of the device would be given back in the middle of this
        assert [run["what"] for run in (*runs, memory)] == ["time"] * case.repeats + ["memory"]
        gb = memory["nbytes"] / 1e9
        values: dict[str, list[float]] = {"capture_ms": [ms(run["seconds"]["capture"]) for run in runs]}
        published = [run["seconds"]["publish"] for run in runs]
        values["publish_ms"] = [ms(value) for value in published]
        values |= {f"{name}_ms": [ms(run["split"][name]) for run in runs] for name in ("allocate", "release", "seal", "pack")}
        values["copy_ms"] = [
            ms(run["split"]["pack"] - run["split"]["allocate"] - run["split"]["release"]) for run in runs
        ]  # and pointing the module's tensors at the copies
        values["commit_ms"] = [ms(run["seconds"]["publish"] - run["split"]["pack"] - run["split"]["seal"]) for run in runs]
        values["python_ms"] = [run["python_ms"] for run in runs]
        row = harness.row("publish", {**case.what, "segments": memory["segments"]}, values)
        row |= {"gb_per_s": gb / row["publish_ms"] * 1e3, "pack_gb_per_s": gb / row["pack_ms"] * 1e3}
        extra = self.report.add(
            "memory", **case.what, segments=memory["segments"], segment_gib=memory["segment_nbytes"] / GIB,
            segments_gib=memory["segments_nbytes"] / GIB,
            extra_gib=memory["extra_nbytes"] / GIB, in_segments=round(memory["extra_nbytes"] / memory["segment_nbytes"], 2),
        )  # fmt: skip
        harness.say(f"  {row['gb_per_s']:,.0f} GB/s; {extra}")
        self.floor(case, gb, floor)
        if case.nbytes == self.plan.cases[-1].nbytes:
            rate = Target(name=f"{case}: publish", target=1000.0, measured=row["gb_per_s"], unit="GB/s", at_least=True)
            self.report.targets.append(rate)
        beside = Target(name=f"{case}: memory beside the weights", target=1.0, measured=extra["in_segments"], unit="segments")
        self.report.targets.append(beside)

    def floor(self, case: Case, gb: float, runs: Sequence[dict[str, Any]]) -> None:
        values = {f"{name}_ms": [ms(run["seconds"][name]) for run in runs] for name in ("allocate", "copy", "free")}
        values["all_ms"] = [ms(sum(run["seconds"].values())) for run in runs]
        values["copy_free_ms"] = [ms(run["seconds"]["copy"] + run["seconds"]["free"]) for run in runs]
        row = self.harness.row("floor", {**case.what, "segments": runs[0]["segments"]}, values)
        row |= {"gb_per_s": gb / row["all_ms"] * 1e3, "copy_free_gb_per_s": gb / row["copy_free_ms"] * 1e3}

    def beside(self, nbytes: int, count: int) -> None:
        harness = self.harness
        with harness.worker("copy_beside_free", device=harness.device, nbytes=nbytes, count=count) as worker:
            worker.step()
            found = worker.step()
        row = {"free_us": found["alone_s"] / count * 1e6, "free_beside_us": found["beside_s"] / count * 1e6}
        row |= {"copy_gb_per_s": found["alone_gb_s"], "copy_beside_gb_per_s": found["beside_gb_s"]}
        harness.say(f"  {self.report.add('beside', mib=nbytes / MIB, count=count, **row)}")


WHAT = {"gib": "GiB", "tensors": "Tensors"}
TABLES = [
    Table(
        kind="publish",
        title="The time of a publish, phase by phase",
        text="Milliseconds. *Publish* is all that follows the capture: allocating segments, copying (and pointing the module's "
        "tensors at the copies), releasing originals, sealing, and committing to the daemon.",
        columns={
            **WHAT, "segments": "Segments", "capture_ms": "Capture", "allocate_ms": "Allocate", "copy_ms": "Copy",
            "release_ms": "Release", "seal_ms": "Seal", "commit_ms": "Commit", "publish_ms": "Publish",
            "gb_per_s": "Publish, GB/s", "pack_gb_per_s": "Without seal and commit, GB/s",
        },
    ),
    Table(
        kind="floor",
        title="What the driver alone takes",
        text="The same copies into segments of the same size, and freeing the same originals before the next segment is made, "
        "with no module around them, in milliseconds. Who keeps the memory beside the weights at one segment is not faster than "
        "that, but for noise: the originals must be gone before the next segment is made, and the next table shows what is copied "
        "meanwhile.",
        columns={
            **WHAT, "segments": "Segments", "allocate_ms": "Allocate", "copy_ms": "Copy", "free_ms": "Free", "all_ms": "All",
            "gb_per_s": "All, GB/s", "copy_free_gb_per_s": "Copy and free alone, GB/s",
        },
    ),
    Table(
        kind="beside",
        title="Copying while memory is freed",
        text="One thread copies all the time, 256 MiB at once, and another one frees allocations: microseconds for each, and "
        "GB/s of the copies, alone and side by side.",
        columns={
            "mib": "MiB each", "count": "Allocations", "free_us": "Free alone, us", "free_beside_us": "Free beside copies, us",
            "copy_gb_per_s": "Copy alone, GB/s", "copy_beside_gb_per_s": "Copy beside frees, GB/s",
        },
    ),
    Table(
        kind="memory",
        title="Memory beside the weights while publishing",
        text="The most that was in use on the device during a publish, less what was in use before: sampled every millisecond, and "
        "after each allocation.",
        columns={
            **WHAT, "segments": "Segments", "segments_gib": "Segments, GiB in all", "segment_gib": "Largest segment, GiB",
            "extra_gib": "At most beside, GiB", "in_segments": "In segments",
        },
    ),
]  # fmt: skip
TEXT = """\
A module of equal bfloat16 matrices is made on the GPU in ordinary memory and published: its tensors are copied into segments and
point there from then on, and the originals are freed meanwhile. After each publish the module's own values are compared with what
they were. Numbers are medians; the JSON, which is `benchmarks/results/publish_cuda.json`, has the least of each beside them."""


def section(result: dict[str, Any]) -> str:
    """This benchmark's part of docs/benchmarks.md."""
    return _report.section(result, title="Publishing from GPU memory", text=TEXT, tables=TABLES)


def write_docs(result: dict[str, Any], page: Path = _report.PAGE) -> None:
    page.write_text(_report.replace_section(page.read_text(), NAME, section(result)))


def main() -> None:
    options = _cuda_harness.arguments(__doc__).parse_args()
    plan = plan_for(on_gpu=options.device != "cpu", quick=options.quick)
    _cuda_harness.run(NAME, options, lambda harness: Bench(harness, plan).run(), TABLES, write_docs)


if __name__ == "__main__":
    main()
