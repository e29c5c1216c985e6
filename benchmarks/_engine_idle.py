"""Publish weights and end, so that they lie there and nobody uses them: ``python benchmarks/_engine_idle.py FOLDER DEVICE GIB``."""

from __future__ import annotations

import sys
from pathlib import Path

from _cuda_models import Stack, make_live, stack_kwargs

from torchwcache import ModelConfig, WeightCache

TENSORS = 200


def main() -> None:
    folder, device, gib = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    kwargs = stack_kwargs(tensors=TENSORS, nbytes=int(gib * (1 << 30)))
    checkpoint = folder / "idle.safetensors"
    checkpoint.touch()  # stands for the files that the weights came from, which a publish by hand does not read
    cfg = ModelConfig(checkpoint, build=Stack, build_kwargs=kwargs, device=device)
    attachment = WeightCache.connect(mode="client").publish(cfg, make_live(kwargs, device), variant="idle")
    print(f"left {attachment.report.mapped_nbytes:,} bytes that nobody uses")


if __name__ == "__main__":
    main()
