"""Fill a module from a checkpoint as ``load_state_dict`` would, but straight into the module's memory.

The names are checked first and all problems are told at once. Tensors are copied *into* the existing ones, as plain PyTorch does,
so that views made in ``__init__`` follow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from torchwcache.errors import StateDictError
from torchwcache.loaders.safetensors_file import Piece, ReadFile, SafetensorsCheckpoint, read_into_memory

__all__ = ["Match", "fill", "load_with_pytorch", "match", "named_targets", "why_pytorch_must_load"]

_BATCH_NBYTES = 16 << 20


def named_targets(module: nn.Module) -> dict[str, torch.Tensor]:
    """What ``load_state_dict`` looks for: parameters and persistent buffers under every name they have, in its order."""
    targets: dict[str, torch.Tensor] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        targets.update((prefix + name, tensor) for name, tensor in child._parameters.items() if tensor is not None)
        for name, tensor in child._buffers.items():
            if tensor is not None and name not in child._non_persistent_buffers_set:
                targets[prefix + name] = tensor
    return targets


def why_pytorch_must_load(module: nn.Module, checkpoint: SafetensorsCheckpoint) -> str | None:
    """Why the module's own loading code must run (hooks, overridden methods), or ``None`` when copying by name is the same."""
    if type(module).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in module.__dict__:
        return f"{type(module).__qualname__} overrides load_state_dict"
    for path, child in module.named_modules():
        kind, prefix = type(child), f"{path}." if path else ""
        where = f"{kind.__qualname__} at {path or 'the root'}"
        if child._load_state_dict_pre_hooks or child._load_state_dict_post_hooks:
            return f"{where} has load_state_dict hooks"
        if kind.set_extra_state is not nn.Module.set_extra_state:
            return f"{where} has extra state"
        if "_load_from_state_dict" in child.__dict__:
            return f"{where} overrides _load_from_state_dict"
        own = kind._load_from_state_dict
        if own is nn.Module._load_from_state_dict:
            continue
        # BatchNorm's override only makes up for a counter that checkpoints from before PyTorch 0.4.1 lack.
        complete = "num_batches_tracked" not in child._buffers or f"{prefix}num_batches_tracked" in checkpoint
        if own is not _NormBase._load_from_state_dict or not complete:
            return f"{where} overrides _load_from_state_dict"
    return None


@dataclass(frozen=True, slots=True)
class Match:
    """Which tensor of the checkpoint goes where.

    Attributes:
        loads: ``(name, target)``, each target once.
        missing: Names that the checkpoint does not hold under any of their tied names (only with ``strict=False``).
        unexpected: Names that the module does not have (only with ``strict=False``).
    """

    loads: tuple[tuple[str, torch.Tensor], ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match(module: nn.Module, checkpoint: SafetensorsCheckpoint, *, strict: bool) -> Match:
    """Check names, shapes and dtypes, all at once.

    A checkpoint that holds one of several tied names is complete, and so is one that holds several with equal bytes.

    Raises:
        StateDictError: In PyTorch's words; shapes and dtypes must fit also when not ``strict``.
    """
    targets = named_targets(module)
    unexpected = tuple(name for name in checkpoint.names() if name not in targets)
    missing: list[str] = []
    mismatched: list[tuple[str, str]] = []
    loads: list[tuple[str, torch.Tensor]] = []
    for names in _tied(targets):
        present = [name for name in names if name in checkpoint]
        if not present:
            missing += names
            continue
        chosen = present[-1]  # where several are given, PyTorch copies one after the other, and the last one stays
        problems = [(name, problem) for name in present if (problem := _misfit(checkpoint, name, targets[name])) is not None]
        if not problems:
            problems = [
                (
                    name,
                    f"values differ for {name}: it is tied to {chosen} in current model, and the checkpoint tells them apart.",
                )
                for name in present[:-1]
                if not checkpoint.same_bytes(name, chosen)
            ]
        mismatched += problems
        loads.append((chosen, targets[chosen]))
    if mismatched or (strict and (missing or unexpected)):
        raise _state_dict_error(module, tuple(missing) if strict else (), unexpected if strict else (), tuple(mismatched))
    return Match(tuple(loads), tuple(missing), unexpected)


def _tied(targets: dict[str, torch.Tensor]) -> Iterable[list[str]]:
    groups: dict[object, list[str]] = {}
    for name, tensor in targets.items():
        key: object = id(tensor)
        if tensor.numel() and not tensor.is_meta:
            # Two Parameter objects over one memory are as tied as one object under two names.
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        groups.setdefault(key, []).append(name)
    return groups.values()


def _misfit(checkpoint: SafetensorsCheckpoint, name: str, target: torch.Tensor) -> str | None:
    info = checkpoint.info(name)
    scalar = target.dim() == 0 and info.shape == (1,)  # as PyTorch does for checkpoints from before 0.4
    if info.shape != tuple(target.shape) and not scalar:
        return (
            f"size mismatch for {name}: copying a param with shape {torch.Size(info.shape)} from checkpoint, "
            f"the shape in current model is {target.shape}."
        )
    if (info.dtype.is_complex and not target.dtype.is_complex) or (
        (info.dtype.is_floating_point or info.dtype.is_complex) and not (target.is_floating_point() or target.is_complex())
    ):
        return f"dtype mismatch for {name}: {info.dtype} in the checkpoint cannot become {target.dtype} without losing its values."
    if any(size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride(), strict=True)):
        return f"{name}: the tensor in current model is expanded, and cannot be written to."
    return None


def _state_dict_error(
    module: nn.Module, missing: tuple[str, ...], unexpected: tuple[str, ...], mismatched: tuple[tuple[str, str], ...]
) -> StateDictError:
    lines = []
    for title, names in (("Missing key(s)", missing), ("Unexpected key(s)", unexpected)):
        if names:
            quoted = ", ".join(f'"{name}"' for name in names)
            lines.append(f"{title} in state_dict: {quoted}. ")
    lines += [reason for _, reason in mismatched]
    text = "\n\t".join([f"Error(s) in loading state_dict for {type(module).__name__}:", *lines])
    return StateDictError(text, missing=missing, unexpected=unexpected, mismatched=mismatched)


def fill(
    checkpoint: SafetensorsCheckpoint,
    loads: Iterable[tuple[str, torch.Tensor]],
    *,
    read_file: ReadFile = read_into_memory,
    device: torch.device | None = None,
    progress: Callable[[int, int], None] | None = None,
    threads: int | None = None,
) -> None:
    """Read tensors into place with a few threads.

    Args:
        checkpoint: Where from.
        loads: ``(name, target)``, as :func:`match` gives them.
        read_file: How to fill memory on ``device``.
        device: What ``read_file`` fills; the CPU by default.
        progress: Called with bytes done and bytes in all.
        threads: How many; by default as many as there are cores, two at least and four at most.

    Raises:
        CorruptCheckpointError: A file ends early.
    """
    device = device if device is not None else torch.device("cpu")
    pieces: list[Piece] = []
    for name, target in loads:
        if target.dim() == 0 and checkpoint.info(name).shape == (1,):
            target = target.detach().view(1)
        if target.device != device and target.device.type != "cpu":
            raise ValueError(f"{name} is on {target.device}, the memory to fill is on {device}")
        pieces += checkpoint.plan(name, target, read_file if target.device == device else read_into_memory)
    pieces.sort(key=lambda piece: (piece.shard, piece.run.offset))
    total, done = sum(piece.nbytes for piece in pieces), 0
    workers = threads if threads is not None else min(4, max(2, os.cpu_count() or 2))
    with ThreadPoolExecutor(workers, thread_name_prefix="torchwcache-read") as pool:
        waiting = {pool.submit(_read_batch, batch) for batch in _batches(pieces)}
        try:
            while waiting:
                finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                done += sum(item.result() for item in finished)
                if progress is not None:
                    progress(done, total)
        finally:
            for item in waiting:
                item.cancel()


def _batches(pieces: list[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    nbytes = 0
    for piece in pieces:
        batch.append(piece)
        nbytes += piece.nbytes
        if nbytes >= _BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _read_batch(batch: list[Piece]) -> int:
    for piece in batch:
        piece()
    return sum(piece.nbytes for piece in batch)


def load_with_pytorch(module: nn.Module, checkpoint: SafetensorsCheckpoint, *, strict: bool) -> tuple[str, ...]:
    """Let the module's own ``load_state_dict`` do it, for modules that change names or values while loading.

    Returns:
        Names that the checkpoint lacks (only with ``strict=False``).

    Raises:
        StateDictError: What ``load_state_dict`` raised.
    """
    state: dict[str, torch.Tensor] = {}
    for path in checkpoint.paths:
        with safe_open(path, framework="pt") as file:
            state.update((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 (it is no mapping)
    targets = named_targets(module)
    for names in _tied(targets):
        present = [name for name in names if name in state]
        if present:
            state.update((name, state[present[-1]]) for name in names if name not in state)
    try:
        keys = module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        raise StateDictError(
            str(error),
            missing=[name for name in targets if name not in state],
            unexpected=[name for name in state if name not in targets],
        ) from error
    return tuple(getattr(keys, "missing_keys", ()))
