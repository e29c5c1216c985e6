"""The bookkeeping of very large models, at full size and without their bytes.

Fingerprint, gate, shard arithmetic, capture, manifest and rebind see every tensor of a model of 235 billion or a trillion weights
in block FP8; the memory behind the tensors is address space that nobody touches, and sealed segments that are all holes.

    python benchmarks/full_size_shapes.py [--quick] [--out FILE] [--docs]
"""

from __future__ import annotations

import argparse
import fcntl
import json
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from _report import PAGE, RESULTS, Report, Table, Target, markdown_table, replace_section, section, write
from _shapes import LING_1T, QWEN3_235B, Model, Shape, toy
from accelerate import init_empty_weights

from torchwcache.identity.code import tree_code_fields
from torchwcache.identity.fingerprint import Fingerprint
from torchwcache.loaders.sharding import shard_scale_slices, shard_slices
from torchwcache.manifest import decode_manifest, encode_manifest, validate
from torchwcache.memory.host import HostMemory
from torchwcache.memory.seals import REQUIRED_SEALS
from torchwcache.module.capture import Captured, Placement, capture
from torchwcache.module.rebind import rebind
from torchwcache.module.replace import replace_tensors
from torchwcache.quantization.registry import check_config, check_tensors

CPU = torch.device("cpu")
SEGMENT_NBYTES = 2 << 30
MAP_NORESERVE = 0x4000
TP_SIZES = (2, 4, 8)
CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}

TABLES = (
    Table(
        kind="shape",
        title="Counts and sizes",
        columns={
            "model": "Model", "experts": "Experts", "tensors": "Tensors", "modules": "Modules", "gib": "GiB",
            "segments": "Segments", "manifest_mib": "Manifest, MiB",
        },
    ),
    Table(
        kind="time",
        title="Times",
        columns={
            "model": "Model", "experts": "Experts", "build_s": "Meta build, s", "fingerprint_ms": "Fingerprint, ms",
            "gate_ms": "Gate, ms", "shards_ms": "Shard arithmetic, ms", "capture_s": "Capture, s", "encode_ms": "Encode, ms",
            "decode_ms": "Decode and check, ms", "map_ms": "Map, ms", "rebind_ms": "Rebind, ms", "us_per_tensor": "us a tensor",
        },
        text="*us a tensor* is what a client pays beyond building the module: decode, check, map and rebind.",
    ),
)  # fmt: skip
TEXT = (
    "Every tensor of the model exists, with its real shape, over address space that is never touched; segments are sealed files "
    "without contents. What is measured is all that an attach does except reading weights, which it does not do."
)


def build(shape: Shape) -> Model:
    with init_empty_weights(include_buffers=True):
        return Model(shape).eval()


@contextmanager
def timed(into: dict[str, float], name: str, scale: float = 1.0) -> Iterator[None]:
    start = time.perf_counter()
    yield
    into[name] = (time.perf_counter() - start) * scale


def without_bytes(module: Model) -> mmap.mmap:
    """Give every tensor memory of its own in one reservation of address space, none of which is ever touched."""
    offsets: dict[int, int] = {}
    end = 0
    for tensor in [*module.parameters(), *module.buffers()]:
        offsets[id(tensor)] = end
        end += -(-tensor.numel() * tensor.element_size() // 64) * 64
    space = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)

    def real(tensor: torch.Tensor, _: str) -> torch.Tensor | None:
        offset = offsets.get(id(tensor))
        if offset is None:
            return None
        flat = torch.frombuffer(space, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        return made.setdefault(id(tensor), torch.nn.Parameter(flat.view(tensor.shape), requires_grad=tensor.requires_grad))

    made: dict[int, torch.Tensor] = {}
    replace_tensors(module, real)
    return space


def place(captured: Captured) -> tuple[list[Placement], list[int]]:
    """Where each storage would lie, in segments of 2 GiB; larger storages get one of their own."""
    placements: list[Placement] = []
    sizes: list[int] = []
    used = 0
    for group in captured.storages:
        offset = -(-used // 64) * 64
        if not sizes or offset + group.nbytes > sizes[-1]:
            sizes.append(max(SEGMENT_NBYTES, -(-group.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE))
            offset = 0
        placements.append(Placement(len(sizes) - 1, offset))
        used = offset + group.nbytes
    return placements, sizes


def sealed_holes(sizes: list[int], stack: ExitStack) -> list[int]:
    fds = []
    for nbytes in sizes:
        fd = os.memfd_create("holes", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        stack.callback(os.close, fd)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS)
        fds.append(fd)
    return fds


def shards(module: Model, shape: Shape) -> int:
    """Every rank's part of every FP8 weight and of its scales, column and row parallel; counts the parts."""
    parts = 0
    for child in module.modules():
        weight = getattr(child, "weight", None)
        if weight is None or getattr(child, "weight_scale_inv", None) is None:
            continue
        rows, columns = weight.shape
        for dim, length in ((0, rows), (1, columns)):
            for size in TP_SIZES:
                if length % (size * shape.block[dim]):
                    continue
                for rank in range(size):
                    shard_slices((rows, columns), dim=dim, size=size, rank=rank)
                    shard_scale_slices((rows, columns), shape.block, dim=dim, size=size, rank=rank)
                    parts += 1
    return parts


def measure(shape: Shape, report: Report) -> tuple[str, float]:
    experts = "fused" if shape.fused else "one module each"
    config = {**CONFIG, "weight_block_size": list(shape.block)}
    times: dict[str, float] = {}
    memory = HostMemory()
    with ExitStack() as stack:
        with timed(times, "build_s"):
            built = build(shape)
        loaded = build(shape)
        space = without_bytes(loaded)
        stack.callback(lambda: space)  # outlives the tensors over it
        with timed(times, "fingerprint_ms", 1e3):
            fields = {"classes": tree_code_fields(built), "config": asdict(shape), "quantization": config}
            fingerprint = Fingerprint.from_fields(fields)
        with timed(times, "gate_ms", 1e3):
            check_tensors(check_config(config, None), loaded, config)
        with timed(times, "shards_ms", 1e3):
            parts = shards(built, shape)
        with timed(times, "capture_s"):
            captured = capture(loaded, built, device=CPU)
        placements, sizes = place(captured)
        with timed(times, "encode_ms", 1e3):
            data = encode_manifest(
                captured.manifest(placements, sizes, fingerprint=fingerprint.hex, device_id="cpu", memory="memfd")
            )
        fds = sealed_holes(sizes, stack)
        client = build(shape)
        with timed(times, "decode_ms", 1e3):
            manifest = decode_manifest(data)
            validate(manifest, [memory.size_of(fd) for fd in fds])
        with timed(times, "map_ms", 1e3):
            segments = [memory.map(fd, nbytes) for fd, nbytes in zip(fds, sizes, strict=True)]
        with timed(times, "rebind_ms", 1e3):
            done = rebind(client, manifest, segments, device=CPU)
        names = {"model": shape.name, "experts": experts}
        report.add(
            "shape",
            **names,
            tensors=done.tensors,
            modules=len(manifest.modules),
            gib=captured.nbytes / 2**30,
            segments=len(sizes),
            manifest_mib=len(data) / 2**20,
            shard_parts=parts,
        )
        bookkeeping_us = (times["decode_ms"] + times["map_ms"] + times["rebind_ms"]) * 1e3 / done.tensors
        report.add("time", **names, **times, us_per_tensor=bookkeeping_us)
    return f"{shape.name}, experts {experts}: microseconds a tensor, all in", bookkeeping_us


def write_docs(result: dict[str, Any], page: Path) -> None:
    """Put this benchmark's part into the page."""
    text = section(result, title="Bookkeeping at full size, without bytes", text=TEXT, tables=TABLES)
    page.write_text(replace_section(page.read_text(), "full_size_shapes", text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy width only: shows that the script runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "full_size_shapes.json")
    parser.add_argument("--docs", action="store_true", help="write the result into the documentation, too")
    parser.add_argument("--docs-only", action="store_true", help="write the documentation from the last result; measure nothing")
    options = parser.parse_args()
    if options.docs_only:
        write_docs(json.loads(options.out.read_text()), PAGE)
        return
    report = Report("full_size_shapes")
    shapes = [QWEN3_235B, replace(QWEN3_235B, fused=False), LING_1T, replace(LING_1T, fused=False)]
    for shape in [toy(shape) for shape in shapes] if options.quick else shapes:
        name, measured = measure(shape, report)
        report.targets.append(Target(name=name, target=15.0, measured=measured, unit="us"))
        print(f"{name}: {measured:.2f}", flush=True)
    result = report.as_dict(complete=not options.quick, options={"quick": options.quick})
    write(options.out, result)
    for table in TABLES:
        print(f"\n{table.title}\n" + markdown_table(table.columns, [row for row in report.rows if row["kind"] == table.kind]))
    if options.docs:
        write_docs(json.loads(json.dumps(result)), PAGE)


if __name__ == "__main__":
    main()
