"""What every benchmark of this project has in common: the JSON it writes, the table it prints, and its part of the documentation.

A result file has ``machine``, ``versions``, ``rows`` and ``targets``. A target that was missed stays in it, and in the
documentation, with what was measured.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What was aimed at, and what came out: ``measured`` must not exceed ``target``, or with ``at_least`` not fall below it."""

    name: str
    target: float
    measured: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.measured >= self.target if self.at_least else self.measured <= self.target

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self) | {"met": self.met}
        return values if self.at_least else {key: value for key, value in values.items() if key != "at_least"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of the documentation: rows of one ``kind``, with a heading for each of their keys that is shown."""

    kind: str
    title: str
    columns: Mapping[str, str]
    text: str = ""


@dataclass(slots=True)
class Report:
    """Collects rows and targets."""

    name: str
    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    started: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.UTC))
    machine: dict[str, Any] = field(default_factory=lambda: describe_machine())

    def add(self, kind: str, **values: Any) -> Row:
        row = {"kind": kind, **values}
        self.rows.append(row)
        return row

    def as_dict(self, *, complete: bool, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "date": self.started.date().isoformat(),
            "complete": complete,
            "options": dict(options),
            "machine": {**self.machine, "load_average_at_end": load_average()},
            "versions": versions(),
            "rows": self.rows,
            "targets": [target.as_dict() for target in self.targets],
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and least of repeated measurements: what is usual, and what the machine does when nobody else uses it."""
    return {"median": median(values), "min": min(values), "repeats": len(values)}


def describe_machine() -> dict[str, Any]:
    memory = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": model[1].strip() if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        "niceness": os.nice(0),
        "load_average_at_start": load_average(),
    }


def load_average() -> float:
    """Of the last minute. Near or above the number of cores, something else was running and times are too long."""
    return round(os.getloadavg()[0], 2)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torchwcache", "torch", "transformers", "safetensors", "accelerate", "xxhash", "msgspec", "cuda-bindings"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{threading.get_ident()}")  # parts of a benchmark may end at the same time
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    unfinished.replace(path)


# ---- text ------------------------------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """A cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def markdown_table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str:
    cells = [list(columns.values()), *([shown(row.get(key)) for key in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


TARGET_COLUMNS = {"name": "Target", "target": "At most", "measured": "Measured", "unit": "Unit", "met": "Met"}


def targets_table(targets: Sequence[Mapping[str, Any]]) -> str:
    """Where some are to be reached and others not to be exceeded, each cell says which."""
    if not any(target.get("at_least") for target in targets):
        return markdown_table(TARGET_COLUMNS, targets)
    words = ["at least" if target.get("at_least") else "at most" for target in targets]
    rows = [{**target, "target": f"{word} {shown(target['target'])}"} for word, target in zip(words, targets, strict=True)]
    return markdown_table(TARGET_COLUMNS | {"target": "Aim"}, rows)


def tables_text(result: Mapping[str, Any], tables: Sequence[Table], *, heading: str) -> str:
    """All tables of a result, targets first."""
    parts = [f"{heading} Targets", targets_table(result["targets"])]
    for table in tables:
        rows = [row for row in result["rows"] if row["kind"] == table.kind]
        if rows:
            columns = {key: name for key, name in table.columns.items() if any(key in row for row in rows)}
            parts += [f"{heading} {table.title}", *([table.text] if table.text else []), markdown_table(columns, rows)]
    return "\n\n".join(parts)


def section(result: Mapping[str, Any], *, title: str, text: str, tables: Sequence[Table]) -> str:
    """A benchmark's part of the documentation; every number in it comes from ``result``."""
    machine = result["machine"]
    loads = f"{shown(machine['load_average_at_start'])} at the start, {shown(machine['load_average_at_end'])} at the end"
    facts = [
        f"Measured on {result['date']} by `{command(result)}`.",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB of memory, Linux {machine['kernel']}; "
        f"load average {loads}{_priority(machine)}.",
        *_gpu(machine),
        "Versions: " + ", ".join(f"{name} {version}" for name, version in result["versions"].items()) + ".",
    ]
    if max(machine["load_average_at_start"], machine["load_average_at_end"]) > machine["cores"]:
        facts.append("**Other work kept the cores busy meanwhile**: times are longer than they would be, and ratios are uncertain.")
    facts += _python(result["rows"])
    missed = [target["name"] for target in result["targets"] if not target["met"]]
    facts.append(f"Targets missed: {'; '.join(missed)}." if missed else "All targets are met.")
    return "\n\n".join([f"## {title}", text, "\n".join(f"- {fact}" for fact in facts), tables_text(result, tables, heading="###")])


def _gpu(machine: Mapping[str, Any]) -> list[str]:
    gpu = machine.get("gpu")
    if not gpu:
        return []
    persistence = f", persistence mode {gpu['persistence_mode'].lower()}" if gpu.get("persistence_mode") else ""
    memory = f"{shown(gpu['memory_gib'])} GiB" if gpu.get("memory_gib") else "unknown memory"
    return [f"GPU: {gpu['name']}, {memory}, driver {gpu.get('driver') or 'unknown'}, CUDA {gpu.get('cuda')}{persistence}."]


def _python(rows: Sequence[Row]) -> list[str]:
    times = [row["python_ms"] for row in rows if "python_ms" in row]
    if not times:
        return []
    return [
        f"A fixed piece of Python, run just before each measurement, took {shown(min(times))} to {shown(max(times))} ms (medians "
        "of each row): on a shared machine everything may take twice as long for minutes. Each measurement waited, for some "
        "seconds at most, until it took no longer than 1.2 times its least so far."
    ]


def _priority(machine: Mapping[str, Any]) -> str:
    niceness = machine.get("niceness", 0)
    return f"; run at niceness {niceness}, since other work went on" if niceness else ""


def command(result: Mapping[str, Any]) -> str:
    options = result.get("options", {})
    parts = ["python", f"benchmarks/{result['benchmark']}.py", options.get("engine")]
    chosen = ["--parts", ",".join(options["parts"])] if options.get("parts") else []
    return " ".join([*filter(None, parts), *chosen, *([] if result["complete"] else ["--quick"])])


def replace_section(page: str, name: str, text: str) -> str:
    """Put ``text`` between this benchmark's marks in a page, or at its end."""
    start, end = f"<!-- {name}: written by the script from its JSON -->", f"<!-- end of {name} -->"
    block = f"{start}\n\n{text}\n\n{end}"
    before, found, rest = page.partition(start)
    return before + block + rest.partition(end)[2] if found else f"{page.rstrip()}\n\n{block}\n"
