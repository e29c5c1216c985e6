"""What a user writes: the model, its place in a parallel layout, the mode and the policies. Imports no torch."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from torchwcache.errors import ConfigError

__all__ = ["Access", "Identity", "Mode", "ModelConfig", "Parallelism", "Policies", "Policy", "Role"]

Build: TypeAlias = Callable[..., Any] | str
"""A class, a callable, or ``"package.module:name"``."""


class Mode(enum.Enum):
    """How a process reaches the cache. ``TORCHWCACHE_MODE`` overrides what the code says."""

    OFF = "off"
    """Load from disk, talk to nobody."""
    CLIENT = "client"
    """Use a daemon that is running already."""
    DAEMON = "daemon"
    """Use the daemon, and start one when none runs."""


class Policy(enum.Enum):
    """What to do when the cache cannot serve."""

    LOAD = "load"
    """Load from disk, and say why in the log and in the report."""
    ERROR = "error"
    """Raise."""


class Role(enum.Enum):
    """Which part of an engine the weights serve."""

    TARGET = "target"
    DRAFT = "draft"


class Identity(enum.Enum):
    """How the content of a checkpoint is established."""

    FULL = "full"
    """Every byte is hashed once; the result is remembered while the files' stat does not change."""
    REHASH = "rehash"
    """Every byte is hashed at every attach: also sees writes through a dirty shared mapping, which leave the stat as it was."""
    SAMPLED = "sampled"
    """Only headers and samples are hashed. Fast, can miss a change, and is itself part of the fingerprint."""


class Access(enum.Enum):
    """What a client's own write to a mapped weight does, on host memory."""

    COPY_ON_WRITE = "copy-on-write"
    """It stays in this process; nobody else sees it."""
    READONLY = "readonly"
    """The process is stopped with SIGSEGV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Sizes and ranks of the parallel layout that a shard belongs to.

    ``dp_matters`` says that the data-parallel rank changes the weights (expert parallelism over data-parallel ranks); only then
    does it enter the fingerprint.

    Raises:
        ConfigError: A size below one, or a rank outside its size.
    """

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    dp_matters: bool = False

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "ep", "dp"):
            size, rank = getattr(self, f"{axis}_size"), getattr(self, f"{axis}_rank")
            if not (_is_int(size) and _is_int(rank) and size >= 1 and 0 <= rank < size):
                raise ConfigError(f"{axis}_rank={rank!r} of {axis}_size={size!r}: need integers with 0 <= rank < size")

    def identity(self) -> dict[str, int]:
        """The sizes and ranks that the weights depend on."""
        axes = ("tp", "pp", "ep", "dp") if self.dp_matters else ("tp", "pp", "ep")
        return {f"{axis}_{what}": getattr(self, f"{axis}_{what}") for axis in axes for what in ("size", "rank")}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """What to do when the cache cannot serve, one policy for each reason."""

    on_mismatch: Policy = Policy.LOAD
    """The slot holds an entry under another fingerprint."""
    on_unavailable: Policy = Policy.LOAD
    """No daemon answers, or it is not ours, hung, or of another protocol version; or there is no memory to publish."""
    on_refused: Policy = Policy.ERROR
    """The model cannot be cached: quantization, capture, or a load that is not a function of the checkpoint."""


def _frozen(mapping: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    if mapping is None:
        return MappingProxyType({})
    if not isinstance(mapping, Mapping) or not all(isinstance(key, str) for key in mapping):
        raise ConfigError(f"{name} must map strings to values, not {mapping!r}")
    return MappingProxyType(dict(mapping))


def _patterns(patterns: object) -> tuple[str, ...]:
    # A string is a sequence of strings, too: of characters, of which "*" means every tensor.
    if isinstance(patterns, str) or not isinstance(patterns, (tuple, list)) or not all(isinstance(p, str) for p in patterns):
        raise ConfigError(f"constants={patterns!r}: expected a list of patterns, such as ['*.inv_freq']")
    return tuple(patterns)


def _dtype_name(dtype: object) -> str | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if isinstance(dtype, str) or type(dtype).__qualname__ == "dtype":
        if name not in _FLOAT_DTYPES:
            raise ConfigError(f"dtype={dtype!r}: expected one of {', '.join(sorted(_FLOAT_DTYPES))}")
        return name
    raise ConfigError(f"dtype={dtype!r}: expected a torch.dtype or its name")


_FLOAT_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True, init=False)
class ModelConfig:
    """Everything that decides the bytes of a finished model.

    Args:
        checkpoint: A Transformers folder or repo id; or, with ``build``, a safetensors file or a folder of shards with or
            without an index.
        build: Makes the module: a class, a callable, or ``"package.module:name"``. Without it the architecture comes from the
            folder's ``config.json``.
        build_kwargs: Keyword arguments for ``build`` (or for the Transformers model class).
        dtype: Floating dtype of the finished model (``"bfloat16"`` or ``torch.bfloat16``); ``None`` keeps the module's own.
        device: Where the weights live, such as ``"cpu"``.
        quantization: Name of an allow-listed method, or ``None`` to go by the checkpoint's config. ``"fp8"`` quantizes a checkpoint
            that is not quantized yet while it is loaded.
        quantization_config: How to quantize at load, in Transformers' words, such as ``{"weight_block_size": (128, 128),
            "modules_to_not_convert": ["lm_head"]}``. Needs ``quantization``.
        finalize: Called with the loaded module before it is captured: own work after loading (fusing, merging). Its code is part
            of the fingerprint.
        overrides: Changes to the Transformers config, such as ``{"rope_theta": 1e6}``.
        parallel: Which shard of the model this is.
        role: Target or draft model.
        identity: How the checkpoint's content is established.
        loader: Name of a registered loader; chosen by the adapter when ``None``.
        adapter: Name of a registered adapter; the one that accepts this config when ``None``.
        strict: Refuse missing and unexpected tensor names, as ``load_state_dict`` does.
        seed: Seeds the load. Without one, a load that initializes tensors anew is not published.
        revision: Revision of a Hugging Face repo id.
        trust_remote_code: Allow the checkpoint's own Python files; they are part of the fingerprint.
        build_meta: Replaces ``build`` when the module is built on the meta device, for an ``__init__`` that cannot run there.
        code_version: Your own version of ``build`` and ``finalize``, for code whose identity cannot be established otherwise.
        ignore: Python attributes that need not be carried, as ``{"path.pattern": "reason"}`` (``fnmatch`` patterns).
        constants: Tensors that nothing writes after loading and that may be shared (``fnmatch`` patterns of their paths).

    Raises:
        ConfigError: A value is of the wrong kind or contradicts another.
    """

    checkpoint: str
    build: Build | None
    build_kwargs: Mapping[str, Any]
    dtype: str | None
    device: str
    quantization: str | None
    quantization_config: Mapping[str, Any]
    finalize: Build | None
    overrides: Mapping[str, Any]
    parallel: Parallelism
    role: Role
    identity: Identity
    loader: str | None
    adapter: str | None
    strict: bool
    seed: int | None
    revision: str | None
    trust_remote_code: bool
    build_meta: Build | None
    code_version: str | None
    ignore: Mapping[str, str]
    constants: tuple[str, ...]

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        *,
        build: Build | None = None,
        build_kwargs: Mapping[str, Any] | None = None,
        dtype: object = None,
        device: object = "cpu",
        quantization: str | None = None,
        quantization_config: Mapping[str, Any] | None = None,
        finalize: Build | None = None,
        overrides: Mapping[str, Any] | None = None,
        parallel: Parallelism | None = None,
        role: Role | Literal["target", "draft"] = Role.TARGET,
        identity: Identity | Literal["full", "rehash", "sampled"] = Identity.FULL,
        loader: str | None = None,
        adapter: str | None = None,
        strict: bool = True,
        seed: int | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        build_meta: Build | None = None,
        code_version: str | None = None,
        ignore: Mapping[str, str] | None = None,
        constants: tuple[str, ...] | list[str] = (),
    ) -> None:
        try:
            path = os.fspath(checkpoint)
        except TypeError as error:
            raise ConfigError(f"checkpoint={checkpoint!r}: expected a path or a repo id") from error
        if not isinstance(path, str) or not path:
            raise ConfigError(f"checkpoint={checkpoint!r}: expected a non-empty text path or a repo id")
        for name, hook in (("build", build), ("finalize", finalize), ("build_meta", build_meta)):
            _check_callable(name, hook)
        if seed is not None and not _is_int(seed):
            raise ConfigError(f"seed={seed!r}: expected an integer")
        if quantization_config and quantization is None:
            raise ConfigError("quantization_config says how to quantize at load: say also by which method, with quantization=")
        values: dict[str, Any] = {
            "checkpoint": path,
            "build": build,
            "build_kwargs": _frozen(build_kwargs, "build_kwargs"),
            "dtype": _dtype_name(dtype),
            "device": str(device),
            "quantization": quantization,
            "quantization_config": _frozen(quantization_config, "quantization_config"),
            "finalize": finalize,
            "overrides": _frozen(overrides, "overrides"),
            "parallel": parallel if parallel is not None else Parallelism(),
            "role": _member(Role, role, "role"),
            "identity": _member(Identity, identity, "identity"),
            "loader": loader,
            "adapter": adapter,
            "strict": bool(strict),
            "seed": seed,
            "revision": revision,
            "trust_remote_code": bool(trust_remote_code),
            "build_meta": build_meta,
            "code_version": code_version,
            "ignore": _frozen(ignore, "ignore"),
            "constants": _patterns(constants),
        }
        for item in fields(self):
            object.__setattr__(self, item.name, values[item.name])


def _check_callable(name: str, hook: object) -> None:
    if hook is None or callable(hook):
        return
    if isinstance(hook, str):
        module, _, attribute = hook.partition(":")
        if module and attribute:
            return
        raise ConfigError(f'{name}={hook!r}: a name must look like "package.module:name"')
    raise ConfigError(f'{name}={hook!r}: expected a class, a callable or "package.module:name"')


def _member(kind: type[Any], value: object, name: str) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        allowed = ", ".join(repr(item.value) for item in kind)
        raise ConfigError(f"{name}={value!r}: expected one of {allowed}") from error


def mode_from(value: Mode | str | None, environ: Mapping[str, str] = os.environ) -> Mode:
    """The mode in force: ``TORCHWCACHE_MODE`` before the argument before ``daemon``."""
    override = environ.get("TORCHWCACHE_MODE")
    if override:
        return _member(Mode, override, "TORCHWCACHE_MODE")  # type: ignore[no-any-return]
    return _member(Mode, value if value is not None else Mode.DAEMON, "mode")  # type: ignore[no-any-return]


def access_from(value: Access | str) -> Access:
    """What a process's own write to a shared weight does."""
    return _member(Access, value, "access")  # type: ignore[no-any-return]


MAX_TIMEOUT_S = 7 * 24 * 3600.0
"""The daemon's bound for a wait."""


def timeout_from(value: float) -> float:
    """How long to wait for another producer, in seconds."""
    if not isinstance(value, (int, float)) or not 0 <= value <= MAX_TIMEOUT_S:
        raise ConfigError(f"timeout_s={value!r}: expected seconds, from 0 to {MAX_TIMEOUT_S:.0f}")
    return float(value)


def policies_from(
    *,
    on_mismatch: Policy | str | None = None,
    on_unavailable: Policy | str | None = None,
    on_refused: Policy | str | None = None,
    fallback: Policy | str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Policies:
    """The policies in force. ``fallback`` (or ``TORCHWCACHE_FALLBACK``) is the one switch that sets all three at once."""
    override = environ.get("TORCHWCACHE_FALLBACK")
    switch = override or fallback
    if switch is not None:
        every = _member(Policy, switch, "TORCHWCACHE_FALLBACK" if override else "fallback")
        return Policies(on_mismatch=every, on_unavailable=every, on_refused=every)
    default = Policies()
    return Policies(
        on_mismatch=_member(Policy, on_mismatch or default.on_mismatch, "on_mismatch"),
        on_unavailable=_member(Policy, on_unavailable or default.on_unavailable, "on_unavailable"),
        on_refused=_member(Policy, on_refused or default.on_refused, "on_refused"),
    )
