"""The models that benchmarks load, and checkpoints of any size for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

TENSORS_PER_BLOCK = 10
_MATRICES = TENSORS_PER_BLOCK - 2
_SHARD_NBYTES = 2 << 30


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Block(nn.Module):
    """Eight matrices and two vectors: about what a layer of a transformer has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_in = Scale(width)
        self.matrices = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(_MATRICES))
        self.scale_out = Scale(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = self.scale_in(x)
        for matrix in self.matrices:
            x = x + matrix(scaled)
        return self.scale_out(x)


class Stack(nn.Module):
    """A plain module. Its forward reads every weight once and computes little: one matrix-vector product for each matrix."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum(0)


def stack_kwargs(*, tensors: int, nbytes: int) -> dict[str, int]:
    """Arguments of a :class:`Stack` of so many bfloat16 tensors and, as nearly as square matrices allow, so many bytes."""
    blocks = tensors // TENSORS_PER_BLOCK
    return {"blocks": blocks, "width": max(8, round((nbytes / 2 / blocks / _MATRICES) ** 0.5))}


def llama_config(nbytes: int) -> Any:
    """A Llama of about so many bytes in bfloat16: width and vocabulary stay, the number of layers follows."""
    from transformers import LlamaConfig

    big = nbytes >= 1 << 29
    hidden, vocabulary = (2048, 32000) if big else (256, 2000)
    intermediate = hidden * 11 // 4
    layer = 2 * hidden * hidden + 2 * hidden * hidden // 4 + 3 * hidden * intermediate
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=max(1, round((nbytes / 2 - 2 * vocabulary * hidden) / layer)),
        num_attention_heads=16,
        num_key_value_heads=4,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def _shapes(module: nn.Module) -> Iterator[tuple[str, torch.Size]]:
    seen = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.shape


def _random(shapes: Iterator[tuple[str, torch.Size]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Small random numbers, from a pool that is read around and around: making fresh ones would take minutes."""
    pool = torch.randn((32 << 20) + 7919, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
    at = 0
    for name, shape in shapes:
        count = shape.numel()
        if at + count > pool.numel():
            at = at % 4099  # not always the same start, so that equal tensors are rare
        long_enough = pool if at + count <= pool.numel() else pool.repeat(-(-(at + count) // pool.numel()))
        yield name, long_enough[at : at + count].reshape(shape).clone()
        at += count


def _shards(tensors: Iterator[tuple[str, torch.Tensor]], shard_nbytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    nbytes = 0
    for name, tensor in tensors:
        shard[name] = tensor
        nbytes += tensor.nbytes
        if nbytes >= shard_nbytes:
            yield shard
            shard, nbytes = {}, 0
    if shard:
        yield shard


def make_stack(folder: Path, kwargs: dict[str, int], *, form: str) -> None:
    """Write a :class:`Stack`'s checkpoint, as ``safetensors`` or as ``torch`` files."""
    from safetensors.torch import save_file

    with torch.device("meta"):
        module = Stack(**kwargs)
    folder.mkdir(parents=True)
    for number, shard in enumerate(_shards(_random(_shapes(module)), _SHARD_NBYTES)):
        if form == "safetensors":
            save_file(shard, folder / f"model-{number:03}.safetensors")
        else:
            torch.save(shard, folder / f"model-{number:03}.pt")


def make_llama(folder: Path, nbytes: int) -> None:
    """Write a Transformers checkpoint, in one file."""
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    config = llama_config(nbytes)
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    config.save_pretrained(folder)
    save_file(dict(_random(_shapes(module))), folder / "model.safetensors", metadata={"format": "pt"})


def make_small_files(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for name, tensor in _random((f"{number:03}", torch.Size([256])) for number in range(count)):
        (folder / f"part-{name}.safetensors").write_bytes(bytes(tensor.view(torch.uint8).tolist()))
