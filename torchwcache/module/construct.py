"""Build modules without their weights (design D10).

Two ways. *meta*: everything on the meta device, as accelerate does it; what clients do. *parameters-meta*: parameters on meta with
ties kept, everything else real; what the producer loads into, and what clients fall back to where an ``__init__`` computes with
tensors of its own.
"""

from __future__ import annotations

import importlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.overrides import TorchFunctionMode

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
    "valueless",
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
    _check_arguments(build, name, cfg.build_kwargs)
    try:
        # Containers anew for each build: what a load changes in one must not show in the module that it is compared with.
        module = build(**_own_copy(dict(cfg.build_kwargs)))
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


def _check_arguments(build: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
    """A wrong call says nothing about what the module needs to be built."""
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):
        return  # a builtin without one
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"build_kwargs do not fit {name}{signature}: {error}") from error


class _NoInitialization(TorchFunctionMode):
    """Initializing a tensor without values does nothing, but torch imports its compiler to find that out."""

    _fills = frozenset(
        {
            torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.fill_, torch.Tensor.zero_, torch.Tensor.bernoulli_,
            torch.Tensor.exponential_, torch.Tensor.random_, torch.Tensor.cauchy_, torch.Tensor.log_normal_,
            torch.Tensor.geometric_,
        }
    )  # fmt: skip

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._fills or getattr(func, "__module__", None) == "torch.nn.init":
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, torch.Tensor) and target.is_meta and func.__name__.endswith("_"):
                return target
        return func(*args, **kwargs)


def _own_copy(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: _own_copy(item) for key, item in value.items()}
    return kind(map(_own_copy, value)) if kind in (list, tuple, set) else value


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
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=True), _NoInitialization():
        return _call(build, cfg, "on the meta device")


def build_parameters_on_meta(cfg: ModelConfig) -> nn.Module:
    """Build with parameters on the meta device, ties kept, and everything else real.

    Raises:
        BuildError: The module's ``__init__`` cannot run without the values of its parameters.
    """
    with torch.random.fork_rng(devices=[]), parameters_on_meta(), _NoInitialization():
        return _call(_builder(cfg), cfg, "without the values of its parameters")


def build_for_real(cfg: ModelConfig) -> nn.Module:
    """Build as plain PyTorch does, with every parameter initialized (``cfg.seed`` seeds it)."""
    if cfg.seed is not None:
        torch.manual_seed(cfg.seed)
    return _call(_builder(cfg), cfg, "on this device")


class _RegisteringOnMeta(threading.local):
    """For each thread, what :func:`parameters_on_meta` has moved; ``None`` while that thread has not entered it."""

    moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] | None = None


_on_meta = _RegisteringOnMeta()
_patch_lock = threading.Lock()
_inside = 0
_patch: tuple[Any, Any] | None = None  # what nn.Module.register_parameter was, and what stands there for it


def _registering_on_meta(register: Callable[..., None]) -> Callable[..., None]:
    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        moved = _on_meta.moved
        if moved is None or param is None or param.is_meta:
            return
        known = moved.get(id(param))
        if known is None or known[0]() is not param:  # an id is reused once its object is gone
            meta = torch.Tensor._make_subclass(type(param), param.detach().to("meta"), param.requires_grad)
            # One dict for both: engines give a parameter its attributes after it was registered (vLLM's ``set_weight_attrs``).
            meta.__dict__ = param.__dict__
            known = moved[id(param)] = (weakref.ref(param), meta)
        self._parameters[name] = known[1]

    return register_on_meta


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While active, every parameter that a module registers *in this thread* is moved to the meta device.

    One parameter registered twice stays one (accelerate's ``init_empty_weights(include_buffers=False)`` makes two of it, which
    breaks ties made in ``__init__``).

    The method that it replaces is the whole process's. So threads count who is inside: what another thread builds meanwhile is
    built as always, and the last one to leave puts the method back.
    """
    global _inside, _patch
    with _patch_lock:
        if _inside == 0:
            before = nn.Module.register_parameter
            _patch = (before, _registering_on_meta(before))
            nn.Module.register_parameter = _patch[1]  # type: ignore[method-assign]
        _inside += 1
    outer, _on_meta.moved = _on_meta.moved, {}
    try:
        yield
    finally:
        _on_meta.moved = outer
        with _patch_lock:
            _inside -= 1
            # Where somebody else has wrapped ours in the meantime it stays, and only passes on.
            if _inside == 0 and _patch is not None and nn.Module.register_parameter is _patch[1]:
                nn.Module.register_parameter = _patch[0]  # type: ignore[method-assign]


def build_without_weights(
    build: Callable[[torch.device], nn.Module], device: torch.device, *, failures: tuple[type[Exception], ...], what: str
) -> tuple[nn.Module, str]:
    """Build an engine's module on meta, or where it computes with tensors of its own, with nothing but its parameters on meta.

    Args:
        build: Makes the module with that device as the default one.
        device: Where tensors are real when the meta device does not do.
        failures: What the engine's code raises for a value that is not there.
        what: The model, for the error.

    Raises:
        BuildError: It cannot be built either way.
    """
    try:
        return build(torch.device("meta")), "meta"
    except failures as first:
        try:
            with parameters_on_meta():
                return build(device), "parameters-meta"
        except failures:
            raise BuildError(f"{what} cannot be built without its weights: {type(first).__name__}: {first}") from first


def materialize(
    module: nn.Module, allocate: Callable[[int], torch.Tensor], expect: Callable[[Iterable[int]], None] = lambda sizes: None
) -> list[str]:
    """Give every meta storage of a module real memory, keeping ties and views.

    Args:
        module: From :func:`build_parameters_on_meta`; changed in place.
        allocate: Returns a zeroed one-dimensional uint8 tensor of so many bytes, with a storage of its own.
        expect: Told the sizes of everything that will be allocated, before the first.

    Returns:
        What :func:`valueless` finds. When there is any, the module was not changed.
    """
    lost = valueless(module)
    if lost:
        return lost
    found = _meta_tensors(module)
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


def valueless(module: nn.Module) -> list[str]:
    """Paths of tensors whose values nobody can tell without a full build.

    They are on the meta device, and no checkpoint fills them: they were computed from a parameter (and do not view it), or they
    are parameters that are not the tree's, such as those of a module in a plain list.

    Args:
        module: From :func:`build_parameters_on_meta`.
    """
    owned = {
        _meta_storage(tensor)
        for item in module.modules()
        for tensor in item._parameters.values()
        if tensor is not None and tensor.is_meta
    }
    return [path for path, tensor in _meta_tensors(module) if _meta_storage(tensor) not in owned]


def _meta_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(path, tensor) for path, tensor in iter_tensors(module).values() if tensor.is_meta]


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
