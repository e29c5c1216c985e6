"""Build modules without their weights (design D10).

Two ways. *meta*: everything on the meta device, as accelerate does it; what clients do. *parameters-meta*: parameters on meta with
ties kept, everything else real; what the producer loads into, and what clients fall back to where an ``__init__`` computes with
tensors of its own.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from torchwcache.config import Build, ModelConfig
from torchwcache.errors import BuildError, ConfigError
from torchwcache.module.replace import iter_tensors, replace_tensors
from torchwcache.module.storages import view_storage

__all__ = [
    "build_for_real",
    "build_on_meta",
    "build_parameters_on_meta",
    "materialize",
    "parameters_on_meta",
    "resolve_callable",
]


def resolve_callable(build: Build, what: str = "build") -> Callable[..., Any]:
    """The callable behind a class, a callable or ``"package.module:name"``.

    Raises:
        ConfigError: The module or the name does not exist, or it is not callable.
    """
    if not isinstance(build, str):
        return build
    module_name, _, qualname = build.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what}={build!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"{what}={build!r} is a {type(found).__name__}, not a class or a callable")
    return found  # type: ignore[no-any-return]


def _call(build: Callable[..., Any], cfg: ModelConfig, how: str) -> nn.Module:
    name = getattr(build, "__qualname__", repr(build))
    try:
        module = build(**cfg.build_kwargs)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:  # what torch raises for a value that is not there
        raise BuildError(
            f"{name} cannot be built {how}: {type(error).__name__}: {error}. Its __init__ must not read, print or branch on the "
            "values of its parameters; if it cannot be changed, pass ModelConfig(build_meta=...), a callable that makes the same "
            "module without them"
        ) from error
    if not isinstance(module, nn.Module):
        raise BuildError(f"{name} returned a {type(module).__name__}, not a torch.nn.Module")
    if cfg.dtype is not None:
        module.to(dtype=getattr(torch, cfg.dtype))
    return module


def _builder(cfg: ModelConfig) -> Callable[..., Any]:
    if cfg.build is None:
        raise ConfigError("ModelConfig needs build= for a checkpoint that is not a Transformers folder")
    return resolve_callable(cfg.build)


def build_on_meta(cfg: ModelConfig) -> nn.Module:
    """Build with parameters, buffers and every other tensor on the meta device.

    Raises:
        BuildError: The module's ``__init__`` cannot run there.
    """
    build = _builder(cfg) if cfg.build_meta is None else resolve_callable(cfg.build_meta, "build_meta")
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=True):
        return _call(build, cfg, "on the meta device")


def build_parameters_on_meta(cfg: ModelConfig) -> nn.Module:
    """Build with parameters on the meta device, ties kept, and everything else real.

    Raises:
        BuildError: The module's ``__init__`` cannot run without the values of its parameters.
    """
    with torch.random.fork_rng(devices=[]), parameters_on_meta():
        return _call(_builder(cfg), cfg, "without the values of its parameters")


def build_for_real(cfg: ModelConfig) -> nn.Module:
    """Build as plain PyTorch does, with every parameter initialized (``cfg.seed`` seeds it)."""
    if cfg.seed is not None:
        torch.manual_seed(cfg.seed)
    return _call(_builder(cfg), cfg, "on this device")


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While active, every parameter that a module registers is moved to the meta device.

    One parameter registered twice stays one (accelerate's ``init_empty_weights(include_buffers=False)`` makes two of it, which
    breaks ties made in ``__init__``).
    """
    register = nn.Module.register_parameter
    moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is None or param.is_meta:
            return
        known = moved.get(id(param))
        if known is None or known[0]() is not param:  # an id is reused once its object is gone
            meta = torch.Tensor._make_subclass(type(param), param.detach().to("meta"), param.requires_grad)
            meta.__dict__.update(param.__dict__)
            known = moved[id(param)] = (weakref.ref(param), meta)
        self._parameters[name] = known[1]

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialize(
    module: nn.Module, allocate: Callable[[int], torch.Tensor], expect: Callable[[Iterable[int]], None] = lambda sizes: None
) -> list[str]:
    """Give every meta storage of a module real memory, keeping ties and views.

    Args:
        module: From :func:`build_parameters_on_meta`; changed in place.
        allocate: Returns a zeroed one-dimensional uint8 tensor of so many bytes, with a storage of its own.
        expect: Told the sizes of everything that will be allocated, before the first.

    Returns:
        Paths of tensors that were *computed* from a parameter (they view no parameter's storage): nobody can tell their values
        without a full build. When there are any, the module was not changed.
    """
    found = [(path, tensor) for path, tensor in iter_tensors(module).values() if tensor.is_meta]
    owned = {_meta_storage(tensor) for _, tensor in found if isinstance(tensor, nn.Parameter)}
    computed = [path for path, tensor in found if _meta_storage(tensor) not in owned]
    if computed:
        return computed
    expect({_meta_storage(tensor): tensor.untyped_storage().nbytes() for _, tensor in found}.values())
    memory: dict[int, torch.UntypedStorage | None] = {}
    made: dict[int, torch.Tensor] = {}
    for _, tensor in found:
        key = _meta_storage(tensor)
        if key not in memory:
            nbytes = tensor.untyped_storage().nbytes()
            memory[key] = allocate(nbytes).untyped_storage() if nbytes else None
        made[id(tensor)] = _real(tensor, memory[key])
    replace_tensors(module, lambda tensor, _: made.get(id(tensor)))
    return []


def _meta_storage(tensor: torch.Tensor) -> int:
    # Meta storages have no address; their identity is that of the storage object.
    return int(tensor.untyped_storage()._cdata)


def _real(tensor: torch.Tensor, storage: torch.UntypedStorage | None) -> torch.Tensor:
    if storage is None:
        plain = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    else:
        plain = view_storage(storage, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
    real = plain if type(tensor) is torch.Tensor else torch.Tensor._make_subclass(type(tensor), plain, tensor.requires_grad)
    real.__dict__.update(tensor.__dict__)
    return real
