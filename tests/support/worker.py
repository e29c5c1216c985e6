"""The inside of a worker: a process of its own that does what a test tells it. See ``support.processes`` for the outside.

One JSON line in (a function and its arguments), one JSON line out (its result, or its exception). The function gets a :class:`Here`
first, which lives as long as the process. Most are in this file; a test's own are imported from the file of the test.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchwcache import ModelConfig, WeightCache
from torchwcache.attachment import Attachment
from torchwcache.config import Parallelism

_HOOKED_OPENS: list[list[str]] = []
"""Where the audit hook notes what is opened, while somebody listens. A hook cannot be taken away again."""


class Here:
    """What this process holds between two orders."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self.attachments: dict[str, Attachment] = {}
        self.models: dict[str, nn.Module] = {}
        self.kept: dict[str, Any] = {}
        self.patches = contextlib.ExitStack()
        self._tell = tell

    def tell(self, event: str) -> None:
        """Say something to the test before the order is carried out."""
        self._tell({"event": event})

    def patch(self, target: Any, name: str, value: Any) -> None:
        """Replace an attribute until the end of the test."""
        before = getattr(target, name)
        self.patches.callback(setattr, target, name, before)
        setattr(target, name, value)

    def tidy(self) -> None:
        """Let go of everything."""
        for attachment in self.attachments.values():
            attachment.close()
        self.attachments.clear()
        self.models.clear()
        self.kept.clear()
        self.patches.close()


def main() -> None:
    """Serve until standard input ends."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # whatever prints must not be taken for an answer

        def tell(message: dict[str, Any]) -> None:
            out.write(json.dumps(message) + "\n")
            out.flush()

        here = Here(tell)
        for line in sys.stdin:
            order = json.loads(line)
            tell(_carried_out(here, order))


def _carried_out(here: Here, order: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": _find(order["file"], order["name"])(here, **order["arguments"])}
    except Exception as error:
        facts = {name: repr(value) for name, value in vars(error).items()}
        return {
            "error": {
                "type": type(error).__name__,
                "kinds": [cls.__name__ for cls in type(error).__mro__],
                "text": str(error),
                "facts": facts,
                "problems": [list(item) for item in getattr(error, "problems", ())],
                "cause": type(error.__cause__).__name__,
                "trace": traceback.format_exc(),
            }
        }


def _find(file: str, name: str) -> Callable[..., Any]:
    if file == __file__:
        return globals()[name]
    path = Path(file)
    module = sys.modules.get(path.stem)
    if module is None:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec
        assert spec.loader
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found: Callable[..., Any] = getattr(module, name)
    return found


# ---- getting models ----------------------------------------------------------------------------------------------------------


def config(cfg: dict[str, Any]) -> ModelConfig:
    """A ``ModelConfig`` from plain values."""
    values = dict(cfg)
    if "parallel" in values:
        values["parallel"] = Parallelism(**values["parallel"])
    return ModelConfig(values.pop("checkpoint"), **values)


def attach(here: Here, *, cfg: dict[str, Any], name: str = "model", **options: Any) -> dict[str, Any]:
    """Attach, keep the attachment under a name, and return its report."""
    attachment = WeightCache.attach(config(cfg), **options)
    here.attachments[name] = attachment
    here.models[name] = attachment.model
    return attachment.report.as_dict()


def publish(here: Here, *, cfg: dict[str, Any], variant: str, source: str = "model", name: str = "published") -> dict[str, Any]:
    """Publish by hand a model that is held here."""
    attachment = WeightCache.connect().publish(config(cfg), here.models[source], variant=variant)
    here.attachments[name] = attachment
    here.models[name] = attachment.model
    return attachment.report.as_dict()


def close(here: Here, *, name: str = "model") -> None:
    """End an attachment."""
    here.attachments.pop(name).close()
    here.models.pop(name)


def load_without_us(here: Here, *, cfg: dict[str, Any], name: str = "model") -> None:
    """What a user without torchwcache would do: the reference for everything.

    No parameter requires grad, as in an attached model: torch chooses kernels by that, also where no gradients are computed.
    """
    here.models[name] = _load_without_us(cfg).requires_grad_(False)


def _load_without_us(cfg: dict[str, Any]) -> nn.Module:
    values = dict(cfg)
    path = values.pop("checkpoint")
    if "build" not in values:
        import transformers

        with open(os.path.join(path, "config.json")) as file:
            cls = getattr(transformers, json.load(file)["architectures"][0])
        loaded: nn.Module = cls.from_pretrained(path, dtype=getattr(torch, values["dtype"]) if "dtype" in values else "auto")
        return loaded
    from safetensors.torch import load_file

    module = resolve(values["build"])(**values.get("build_kwargs", {}))
    state = load_file(path)
    for missing, tensor in module.state_dict(keep_vars=True).items():
        for other, twin in module.state_dict(keep_vars=True).items():
            if tensor is twin and other in state:  # a checkpoint holds one of two tied names
                state.setdefault(missing, state[other])
    module.load_state_dict(state)
    module.eval()
    if "finalize" in values:
        resolve(values["finalize"])(module)
    return module  # type: ignore[no-any-return]


def resolve(name: str) -> Callable[..., Any]:
    """The thing behind ``"package.module:name"``."""
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


# ---- looking at models -------------------------------------------------------------------------------------------------------


def digest(tensor: torch.Tensor) -> str:
    """Of the raw bytes: equal only if every bit is."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def example_inputs(model: nn.Module) -> dict[str, torch.Tensor]:
    """Something to feed a model with, the same in every process."""
    if hasattr(model, "example_inputs"):
        return model.example_inputs()  # type: ignore[no-any-return]
    cfg: Any = model.config
    if model.main_input_name == "pixel_values":
        shape = (2, cfg.num_channels, cfg.image_size, cfg.image_size)
        count = torch.Size(shape).numel()
        return {"pixel_values": torch.linspace(-1, 1, count).reshape(shape).to(model.dtype)}
    ids = (torch.arange(24).reshape(2, 12) * 7 + 3) % cfg.vocab_size
    inputs = {"input_ids": ids}
    if getattr(cfg, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids[:, :4]
    return inputs


def output(here: Here, *, name: str = "model") -> str:
    """Digest of everything that a model answers to its example inputs."""
    model = here.models[name]
    with torch.no_grad():
        return hashlib.sha256("".join(digest(item) for item in _tensors(model(**example_inputs(model)))).encode()).hexdigest()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for key in value:
            if key not in ("past_key_values", "cache_params"):
                yield from _tensors(value[key])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def picture(here: Here, *, name: str = "model") -> dict[str, Any]:
    """All of a module that two processes can compare: every tensor's bits and layout, what is tied, what is persistent."""
    module = here.models[name]
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    return {
        "class": f"{type(module).__module__}:{type(module).__qualname__}",
        "parameters": {path: _facts(tensor) for path, tensor in parameters.items()},
        "buffers": {path: _facts(tensor) for path, tensor in buffers.items()},
        "ties": {path: first.setdefault(id(tensor), path) for path, tensor in {**parameters, **buffers}.items()},
        "transient": {path: sorted(item._non_persistent_buffers_set) for path, item in module.named_modules()},
        "training": {path: item.training for path, item in module.named_modules()},
        "state_dict": list(module.state_dict()),
    }


def _facts(tensor: torch.Tensor) -> list[Any]:
    kind = type(tensor).__name__
    return [digest(tensor), str(tensor.dtype), list(tensor.shape), list(tensor.stride()), kind, str(tensor.device)]


def verify(here: Here, *, name: str = "model") -> list[str]:
    """``Attachment.verify``."""
    return list(here.attachments[name].verify())


def entries(here: Here) -> list[dict[str, Any]]:
    """What the daemon holds."""
    found = WeightCache.connect(mode="client").entries()
    return [{"key": e.key, "leases": e.leases, "hits": e.hits, "superseded": e.superseded, "nbytes": e.nbytes} for e in found]


# ---- looking at this process -------------------------------------------------------------------------------------------------


def footprint(here: Here, *, collect: bool = True) -> dict[str, int]:
    """How many of our mappings and descriptors this process has, and how many descriptors in all."""
    if collect:
        gc.collect()
    with open("/proc/self/maps") as file:
        maps = sum("memfd:torchwcache" in line for line in file)
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return {"maps": maps, "memfds": sum("memfd:torchwcache" in link for link in links), "fds": len(links)}


def listen_to_opens(here: Here) -> None:
    """From now on note every file that Python opens here."""
    if not _HOOKED_OPENS:
        _HOOKED_OPENS.append([])
        sys.addaudithook(lambda event, args: _HOOKED_OPENS[0].append(str(args[0])) if event == "open" else None)
    _HOOKED_OPENS[0] = []


def opened(here: Here) -> list[str]:
    """What was opened since :func:`listen_to_opens`."""
    return list(_HOOKED_OPENS[0])


def settle(here: Here, *, environment: dict[str, str]) -> None:
    """Begin a test: with these variables, and none of another test."""
    for name in [name for name in os.environ if name.startswith(("TORCHWCACHE_", "TEST_"))]:
        del os.environ[name]
    os.environ.update(environment)


def tidy(here: Here) -> dict[str, int]:
    """End a test: let go of everything, and say what is left all the same."""
    here.tidy()
    found = footprint(here)
    gc.freeze()  # what is left now (modules, mostly) stays: looking through it again and again takes longer than the tests
    return found


# ---- stopping half-way -------------------------------------------------------------------------------------------------------


def attach_and_stop(here: Here, *, at: str, release: str, **order: Any) -> dict[str, Any]:
    """Attach as a producer that stops half-way, says so, and goes on when the file ``release`` exists.

    Args:
        at: ``load``: everything was read. ``capture``: it is about to begin. ``publish``: all is sealed, nothing was sent.
    """
    from torchwcache.production import Heartbeat
    from torchwcache.wire.client import DaemonConnection
    from torchwcache_nn.adapter import NNAdapter

    def stop() -> None:
        here.tell(at)
        deadline_s = time.monotonic() + 60
        while not os.path.exists(release):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nobody released the producer that stopped at {at}")
            time.sleep(0.01)

    load, phase, commit = NNAdapter.load, Heartbeat.phase, DaemonConnection.commit

    def load_and_stop(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        stop()
        return result

    def stop_before_capture(self: Heartbeat, name: str) -> None:
        phase(self, name)
        if name == "capture":
            stop()

    def stop_and_commit(*args: Any, **kwargs: Any) -> Any:
        stop()
        return commit(*args, **kwargs)

    match at:
        case "load":
            here.patch(NNAdapter, "load", load_and_stop)
        case "capture":
            here.patch(Heartbeat, "phase", stop_before_capture)
        case "publish":
            here.patch(DaemonConnection, "commit", stop_and_commit)
    return attach(here, **order)


def beat_often(here: Here, *, seconds: float) -> None:
    """Send signs of life more often than a producer usually does."""
    from torchwcache import production

    here.patch(production, "_HEARTBEAT_S", seconds)
