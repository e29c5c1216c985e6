"""One measurement in a process of its own: ``python benchmarks/_start_worker.py FUNCTION JSON`` prints one line of JSON.

Imports are done before the clock starts, so that the times are the weights' alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOKENS = 8


def stack_kwargs(tensors: int, nbytes: int) -> dict[str, Any]:
    import _models

    return dict(_models.stack_kwargs(tensors=tensors, nbytes=nbytes))


def make_stack(folder: str, kwargs: dict[str, int], form: str) -> dict[str, Any]:
    import _models

    _models.make_stack(Path(folder), kwargs, form=form)
    return {}


def make_llama(folder: str, nbytes: int) -> dict[str, Any]:
    import _models

    _models.make_llama(Path(folder), nbytes)
    return {}


def make_small_files(folder: str, count: int) -> dict[str, Any]:
    import _models

    _models.make_small_files(Path(folder), count)
    return {}


# ---- starts ------------------------------------------------------------------------------------------------------------------


def attach(folder: str, kwargs: dict[str, int] | None) -> dict[str, Any]:
    """Attach, or load and publish when there is nothing to attach; then two forwards."""
    import _models

    import torchwcache.attaching
    import torchwcache.loaders.huggingface
    import torchwcache.loaders.safetensors  # noqa: F401
    import torchwcache_nn  # noqa: F401
    from torchwcache import ModelConfig, WeightCache

    if kwargs is None:
        import transformers.models.llama.modeling_llama  # noqa: F401

        cfg = ModelConfig(folder)
    else:
        cfg = ModelConfig(folder, build=_models.Stack, build_kwargs=kwargs, dtype="bfloat16")
    started = time.perf_counter()
    attachment = WeightCache.attach(cfg, mode="client", fallback="error")
    ready_s = time.perf_counter() - started
    with attachment as model:
        report = attachment.report
        found = {
            "source": report.source,
            "ready_s": ready_s,
            "build_s": report.seconds["build"],
            "seconds": report.seconds,
            "tensors": report.tensors,
            "mapped_nbytes": report.mapped_nbytes,
            "copied_nbytes": report.copied_nbytes,
        }
        if report.source == "cache":
            found |= forwards(model, kwargs)
    return found


def load_file(folder: str, kwargs: dict[str, int]) -> dict[str, Any]:
    from safetensors.torch import load_file

    return _assign(folder, kwargs, "*.safetensors", load_file)


def torch_load(folder: str, kwargs: dict[str, int]) -> dict[str, Any]:
    import torch

    return _assign(folder, kwargs, "*.pt", lambda path: torch.load(path, mmap=True, weights_only=True))


def _assign(folder: str, kwargs: dict[str, int], pattern: str, load: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    import _models
    import torch

    started = time.perf_counter()
    with torch.device("meta"):
        model = _models.Stack(**kwargs).eval()
    built_s = time.perf_counter()
    state: dict[str, Any] = {}
    for path in sorted(Path(folder).glob(pattern)):
        state |= load(path)
    model.load_state_dict(state, assign=True)
    ready_s = time.perf_counter() - started
    del state
    model.requires_grad_(False)
    return {"ready_s": ready_s, "build_s": built_s - started, **forwards(model, kwargs)}


def from_pretrained(folder: str) -> dict[str, Any]:
    import accelerate  # noqa: F401 - imported by the first load otherwise
    from transformers import LlamaForCausalLM

    started = time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(folder)
    ready_s = time.perf_counter() - started
    return {"ready_s": ready_s, "build_s": None, **forwards(model.requires_grad_(False), None)}


def forwards(model: Any, kwargs: dict[str, int] | None) -> dict[str, float]:
    """The first forward touches every page of the weights for the first time; the second finds them there.

    On one thread: where other processes want the cores, too, threads of one small product wait for each other for milliseconds,
    which says nothing about how a module came about.
    """
    import torch

    torch.set_num_threads(1)
    found = {}
    with torch.inference_mode():
        given = torch.arange(TOKENS)[None] if kwargs is None else torch.ones(1, kwargs["width"], dtype=torch.bfloat16)
        for name in ("first_forward_s", "second_forward_s"):
            started = time.perf_counter()
            model(given)
            found[name] = time.perf_counter() - started
    return found


# ---- small things --------------------------------------------------------------------------------------------------------------


def start_daemon(socket: str) -> dict[str, Any]:
    from torchwcache.daemon import supervisor
    from torchwcache.wire.client import DaemonConnection

    started = time.perf_counter()
    supervisor.start_daemon(socket)
    ready_s = time.perf_counter() - started
    with DaemonConnection.connect(socket) as connection:
        connection.stop()
    return {"ready_s": ready_s}


def remembered(folder: str) -> dict[str, Any]:
    """Ask for the identity of files that were hashed before; hash them when they were not."""
    from torchwcache.identity.checkpoint import CheckpointFiles, CheckpointIdentity

    files = CheckpointFiles.in_folder(Path(folder), [path.name for path in Path(folder).iterdir()])
    started = time.perf_counter()
    with CheckpointIdentity(files) as identity:
        known = identity.remembered()
        seconds = time.perf_counter() - started
        if known is None:
            identity.compute()
    return {"seconds": seconds, "known": known is not None, "files": len(files.files)}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
