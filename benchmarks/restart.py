"""What a start of a Transformers model consists of, from the process's start to its first token: from disk, and from the cache.

    python benchmarks/restart.py [--device cuda|cpu] [--quick] [--gib 8] [--out FILE] [--dir FOLDER] [--docs | --docs-only]

Makes a Qwen3 with random weights, starts it from disk with its files in the page cache, once as the first process that attaches it
(which loads and publishes it), and from the cache. All must give the same logits, bit for bit. Needs its size on disk and in host
memory, and twice its size on the GPU; about two minutes on an H200 with 8 GiB.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import _cuda_harness
import _report
from _cuda_harness import Harness, ms
from _cuda_waterfall import Block, waterfall
from _report import Table, Target

NAME = Path(__file__).stem
WORKER = Path(__file__).with_name("_cuda_restart_worker.py")
PICTURE = "restart.svg"
SETTLED_S = 2.5
"""Only files that were last touched longer ago than two seconds have an identity that can be remembered."""
MIB = 1 << 20
SHARE_PERCENT = 2.0
"""What *vanishes* is taken to mean."""

WAYS = {
    "disk": "from disk, page cache warm",
    "first": "first attach: load and publish",
    "cache": "attach from the cache",
}
PHASES = {
    "interpreter": "Interpreter",
    "import_torch": "import torch",
    "import_transformers": "import transformers",
    "import_torchwcache": "import torchwcache",
    "context": "CUDA context",
    "build": "Build",
    "fingerprint": "Fingerprint",
    "weights": "Weights",
    "publish": "Capture and publish",
    "other": "Rest of the attach",
    "first_forward": "First forward",
}
LATER = "second_forward"


class Bench:
    """Makes the model, and starts it."""

    def __init__(self, harness: Harness, *, gib: float, repeats: int) -> None:
        self.harness, self.gib, self.repeats = harness, gib, repeats
        self.report = harness.report
        self.model = harness.folder / "model"
        self.runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}

    def run(self) -> None:
        harness = self.harness
        harness.say(f"making a model of {self.gib:g} GiB")
        made = self.work("make_model", gib=self.gib)
        if harness.on_gpu:
            harness.note_gpu(harness.work("machine", device=harness.device))
        time.sleep(SETTLED_S)
        for path in self.model.iterdir():
            read_all(path)
        with harness.daemon():
            for way in ("first", *("disk", "cache") * self.repeats):
                self.start(way)
        self.rows(made)
        self.compare()

    def work(self, way: str, **given: Any) -> dict[str, Any]:
        with self.harness.worker(way, script=WORKER, folder=str(self.model), device=self.harness.device, **given) as worker:
            return worker.step()

    def start(self, way: str) -> None:
        found = self.work(way, spawned=time.monotonic())
        self.runs[way].append(found)
        phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in found["seconds"].items())
        self.harness.say(f"  {WAYS[way]}: {found['until_first_s']:.3f} s ({phases})")

    def compare(self) -> None:
        """All starts give the same: a fast start that computes something else is worth nothing."""
        outputs = {(way, run["token"], run["logits"], run["attention"]) for way, runs in self.runs.items() for run in runs}
        if len({output[1:] for output in outputs}) != 1:
            raise AssertionError(f"the starts do not agree: {sorted(outputs)}")
        run = self.runs["disk"][0]
        assert run["finite"], "the logits are not finite: equal outputs would say nothing"
        assert run["distinct"] > 100, "the logits are all alike: equal outputs would say nothing"

    def rows(self, made: dict[str, Any]) -> None:
        gib = made["nbytes"] / 2**30
        for way, runs in self.runs.items():
            what = {"way": way, "name": WAYS[way], "gib": gib, "tensors": runs[0]["tensors"]}
            names = [name for name in (*PHASES, LATER) if any(name in run["seconds"] for run in runs)]
            values = {f"{name}_ms": [ms(run["seconds"][name]) for run in runs] for name in names}
            values["until_first_ms"] = [ms(run["until_first_s"]) for run in runs]
            self.harness.row("start", what, values)
            # For the picture: one start as it was. Medians of phases do not add up to anything.
            usual = sorted(runs, key=lambda run: run["until_first_s"])[len(runs) // 2]
            self.report.add(
                "waterfall", **what, seconds={name: usual["seconds"][name] for name in PHASES if name in usual["seconds"]}
            )
        for run in self.runs["cache"]:
            self.report.add("attach", seconds=run["report"]["seconds"], same_addresses=run["report"].get("same_addresses"))
        for way, runs in self.runs.items():
            for run in runs:
                self.report.add("output", way=way, token=run["token"], logits_sha256=run["logits"], attention=run["attention"])
        share = [run["seconds"]["weights"] / run["until_first_s"] * 100 for run in self.runs["cache"]]
        target = Target(
            name="start from the cache: weights, of the time until the first token",
            target=SHARE_PERCENT, measured=_report.spread(share)["median"], unit="%",
        )  # fmt: skip
        self.report.targets.append(target)


def read_all(path: Path) -> None:
    """Bring a file into the page cache."""
    buffer = bytearray(4 * MIB)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


TABLES = [
    Table(
        kind="start",
        title="From the process's start to the first token",
        text="Milliseconds, medians. *Weights* is: from disk, `from_pretrained` less making the module; at the first attach, the "
        "load; from the cache, from connecting to a module with all its tensors. The second forward is not part of the sum.",
        columns={
            "name": "Start", "gib": "GiB", "tensors": "Tensors", **{f"{name}_ms": title for name, title in PHASES.items()},
            "until_first_ms": "Until the first token", "second_forward_ms": "Second forward",
        },
    ),
]  # fmt: skip
TEXT = """\
A Qwen3 made from a config, with random weights in bfloat16, is started in a fresh process and computes one token: by
`from_pretrained(device_map=...)` with all files in the page cache, which is the best case for loading; by the first attach, which
loads and publishes; and by attaches from the cache. The logits of all starts are equal, bit for bit, or the benchmark fails. The
JSON is `benchmarks/results/restart.json`."""


def picture(result: dict[str, Any]) -> str:
    """The waterfall of a result."""
    rows = [row for row in result["rows"] if row["kind"] == "waterfall"]
    blocks = [Block(title=row["name"].capitalize(), seconds=row["seconds"]) for row in rows]
    return waterfall(blocks, PHASES, strong="weights", title="Starts from disk and from the cache, phase by phase")


def section(result: dict[str, Any]) -> str:
    """This benchmark's part of docs/benchmarks.md."""
    image = f"![Three starts, phase by phase: the table below has the numbers.](assets/{PICTURE})"
    return _report.section(result, title="A restart, phase by phase", text=f"{TEXT}\n\n{image}", tables=TABLES)


def write_docs(result: dict[str, Any], page: Path = _report.PAGE) -> None:
    """The page, and the picture in the folder beside it."""
    page.write_text(_report.replace_section(page.read_text(), NAME, section(result)))
    target = page.parent / "assets" / PICTURE
    target.parent.mkdir(exist_ok=True)
    target.write_text(picture(result))


def main() -> None:
    parser = _cuda_harness.arguments(__doc__)
    parser.add_argument("--gib", type=float, help="size of the model (8; with --quick 2; on the CPU a fiftieth)")
    options = parser.parse_args()
    on_gpu = options.device != "cpu"
    gib = options.gib or (0.02 if not on_gpu else 2.0 if options.quick else 8.0)
    repeats = 3 if on_gpu and not options.quick else 1
    _cuda_harness.run(NAME, options, lambda harness: Bench(harness, gib=gib, repeats=repeats).run(), TABLES, write_docs, gib=gib)


if __name__ == "__main__":
    main()
