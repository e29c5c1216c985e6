"""How often the first elementwise function of a process is wrong on the CPU, and what torchwcache does about it.

``python benchmarks/first_call.py [--quick] [--out FILE]`` writes its JSON to ``benchmarks/results/first_call.json``, and its part
of ``docs/benchmarks.md``; ``--docs-only`` does the latter from the JSON. Each trial is a process of its own, two at a time: it
computes one function of one tensor twice, with four threads, and compares the two. In every second pair,
``torchwcache.module.vml`` was at work before. See there for the fault, which is one of oneMKL: with a release that has it mended,
or without oneMKL, nothing is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
from pathlib import Path
from typing import Any

import torch
from _report import PAGE, RESULTS, Report, Table, Target, replace_section, section, write

from torchwcache.module.vml import choose_vml_kernels

THREADS = 4
AT_ONCE = 2
NUMEL = 4 * 4096
FUNCTIONS = {"cos": torch.cos, "sin": torch.sin, "sqrt": torch.sqrt}
TABLES = [
    Table(
        kind="first_call",
        title="First calls that were wrong",
        columns={
            "function": "Function", "processes": "Processes each", "wrong": "Wrong", "largest_error": "Largest error",
            "wrong_chosen": "Wrong, kernels chosen before",
        },
    ),
]  # fmt: skip
TEXT = """\
How often the first elementwise function of a process is wrong on the CPU, since oneMKL chooses its kernel while four threads call
it, and how often it is after torchwcache has had the kernels chosen, as it does before it builds or loads a model."""


def trial(name: str, chosen: bool) -> float:
    """The largest difference between a first and a second call."""
    torch.set_num_threads(THREADS)
    values = torch.rand(NUMEL) * 0.9 + 0.05
    values * values  # makes the threads
    if chosen:
        choose_vml_kernels()
    function = FUNCTIONS[name]
    first, second = function(values), function(values)
    return float((first - second).abs().max())


def start(name: str, chosen: bool) -> tuple[int, int]:
    """A trial in a child; its pid, and a pipe to its result."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, struct.pack("d", trial(name, chosen)))
        finally:
            os._exit(0)
    os.close(writing)
    return pid, reading


def finish(pid: int, reading: int) -> float:
    with os.fdopen(reading, "rb") as pipe:
        result: float = struct.unpack("d", pipe.read(8))[0]
    os.waitpid(pid, 0)
    return result


def measure(name: str, processes: int) -> dict[str, Any]:
    errors: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * processes // AT_ONCE):
        chosen = bool(number % 2)
        children = [start(name, chosen) for _ in range(AT_ONCE)]
        errors[chosen] += [finish(*child) for child in children]
    return {
        "function": f"torch.{name}",
        "processes": len(errors[False]),
        "wrong": sum(error > 0 for error in errors[False]),
        "largest_error": f"{max(errors[False]):.1e}",
        "wrong_chosen": sum(error > 0 for error in errors[True]),
    }


def write_docs(result: dict[str, Any], page: Path = PAGE) -> None:
    text = section(result, title="The first call in a process", text=TEXT, tables=TABLES)
    page.write_text(replace_section(page.read_text(), "first_call", text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few processes: whether it works, not how often a call is wrong")
    parser.add_argument("--docs-only", action="store_true", help="write the documentation from the JSON")
    parser.add_argument("--out", type=Path, default=RESULTS / "first_call.json")
    options = parser.parse_args()
    if options.docs_only:
        write_docs(json.loads(options.out.read_text()))
        return
    report = Report("first_call")
    for name in FUNCTIONS:
        row = report.add("first_call", **measure(name, 20 if options.quick else 6000))
        print(json.dumps(row))
    wrong = sum(row["wrong_chosen"] for row in report.rows)
    report.targets.append(Target(name="wrong first calls, kernels chosen before", target=0, measured=wrong, unit="calls"))
    result = report.as_dict(complete=not options.quick, options={})
    write(options.out, result)
    if not options.quick:
        write_docs(result)


if __name__ == "__main__":
    main()
