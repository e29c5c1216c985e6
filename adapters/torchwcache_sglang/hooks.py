"""The hooks: where SGLang asks for a loader, where it would write into weights, and whether the first was reached at all."""

from __future__ import annotations

import copy
import logging
import pkgutil
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from torchwcache_sglang import guards, seams
from torchwcache_sglang.context import option
from torchwcache_sglang.settings import options_from, split_extra_config
from torchwcache_sglang.tokenizer_workers import WRITE_ARGUMENTS, around_write

__all__ = [
    "BALANCE_CHECK",
    "GET_LOADER",
    "LOAD_MODEL",
    "around_balance_check",
    "around_get_model_loader",
    "around_load_model",
    "register_hooks",
]

logger = logging.getLogger("sglang.torchwcache")

GET_LOADER = "sglang.srt.model_loader.loader.get_model_loader"
LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
BALANCE_CHECK = "sglang.srt.distributed.bootstrap._check_tp_memory_balance"

_REFUSED = "_torchwcache_refused"
"""Set on a loader of SGLang's that is used although the cache was asked for: the reason was said."""

_target: weakref.ref[Any] | None = None
"""The runner of the engine's model, to which its draft belongs."""


def register_hooks() -> None:
    """Put them in place; SGLang applies them after all plugins have run.

    Raises:
        LookupError: This release of SGLang has nothing where we have to be.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target in (GET_LOADER, LOAD_MODEL):
        _resolve(target)
    HookRegistry.register(GET_LOADER, around_get_model_loader, HookType.AROUND)
    HookRegistry.register(LOAD_MODEL, around_load_model, HookType.AROUND)
    others = {**guards.GUARDS, **guards.CALLER_GUARDS, **guards.UPDATER_GUARDS}
    others |= {WRITE_ARGUMENTS: around_write, BALANCE_CHECK: around_balance_check}
    for target, hook in others.items():
        try:
            _resolve(target)
        except LookupError:
            continue  # an operation that this release does not have
        HookRegistry.register(target, hook, HookType.AROUND)


def _resolve(target: str) -> Any:
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"SGLang {seams.installed_version()} has no {target}") from error


def around_get_model_loader(original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
    """SGLang's own loader, or ours around it."""
    ours, theirs = split_extra_config(load_config.model_loader_extra_config)
    options = options_from(ours)
    if ours is not None:
        load_config = copy.copy(load_config)
        load_config.model_loader_extra_config = theirs  # SGLang's loaders refuse what they do not know
    inner = original(load_config, model_config)
    if options is None or guards.updating_in_place():
        return inner
    from torchwcache_sglang.loader import CacheLoader
    from torchwcache_sglang.refusals import refusal

    warning = seams.check()[0]
    if warning:
        logger.warning("%s", warning)
    why = refusal(inner, model_config)
    if why is not None:
        _refuse(why, options)
        from torchwcache_sglang.unshared import make_room

        setattr(inner, _REFUSED, True)
        make_room(inner, model_config, options)
        return inner
    return CacheLoader(inner, options)


def _refuse(why: str, options: Any) -> None:
    from torchwcache.config import Policy
    from torchwcache.errors import RefusedError

    if options.policies.on_refused is Policy.ERROR:
        raise RefusedError(f"this model cannot be cached: {why}", reason=why, kind="SGLang")
    logger.warning("torchwcache: this model is not cached: %s. It is loaded as without torchwcache", why)


def around_load_model(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """See that a model for which the cache was asked for did not go past it, and account for what was there before."""
    result = original(runner, *args, **kwargs)
    _self_check(runner)
    _account(runner)
    if getattr(getattr(runner, "loader", None), _REFUSED, False):
        from torchwcache_sglang.unshared import account_room

        account_room(runner)
    return result


def around_balance_check(original: Callable[..., Any], *, pre_model_load_memory: float, local_gpu_memory: float) -> Any:
    """Whether as much is free on the devices of all ranks, in GiB; nothing is loaded yet.

    Weights in the cache may lie on one of them only, or be larger there, and are no other program's: they are mapped, or evicted.
    """
    try:
        return original(pre_model_load_memory=pre_model_load_memory, local_gpu_memory=local_gpu_memory)
    except RuntimeError as error:
        options = options_from(split_extra_config(option("model_loader_extra_config"))[0])
        if options is None or pre_model_load_memory + _cached_gib(options.socket) < local_gpu_memory * 0.9:
            raise
        logger.warning("torchwcache: weights in the cache are why; the start goes on. SGLang says: %s", error)


def _cached_gib(socket: str) -> float:
    """What is in the cache on that device of this machine where it is most, in GiB."""
    from torchwcache.errors import WeightCacheError
    from torchwcache.wire.client import DaemonConnection

    cached: Counter[str] = Counter()
    try:
        with DaemonConnection.connect(socket) as connection:
            for entry in connection.entries():
                if entry.memory == "cuda":
                    cached[entry.device] += entry.nbytes
    except (WeightCacheError, OSError) as error:
        logger.debug("what is in the cache is not known: %s", error)
    return max(cached.values(), default=0) / (1 << 30)


def _self_check(runner: Any) -> None:
    loader, load_config = getattr(runner, "loader", None), getattr(runner, "load_config", None)
    if load_config is None or type(loader).__module__.startswith(__package__) or getattr(loader, _REFUSED, False):
        return
    options = options_from(split_extra_config(load_config.model_loader_extra_config)[0])
    if options is None:
        return
    from torchwcache.config import Policy
    from torchwcache.errors import PluginError

    text = (
        f"torchwcache was asked for, but SGLang loaded by itself, with {type(loader).__name__}: the hook on {GET_LOADER} did not "
        "fire. Look for another plugin that replaces it, and for `Failed to apply hooks` further up"
    )
    if options.policies.on_unavailable is Policy.ERROR:
        raise PluginError(text)
    logger.error("%s", text)


def _account(runner: Any) -> None:
    """Releases before 0.5.19 do not ask the loader what to add to the baseline, and later ones add nothing that is negative.

    The KV cache of a target and its draft is sized by the target's baseline alone, when both are loaded.
    """
    global _target
    if not getattr(runner, "is_draft_worker", False):
        _target = weakref.ref(runner)
    nbytes = getattr(getattr(runner, "loader", None), "baseline_nbytes", 0)
    if hasattr(type(runner), "account_preloaded_weights"):
        nbytes = min(0, nbytes)
    target: Any = None if _target is None else _target()
    if nbytes and hasattr(target, "pre_model_load_memory"):
        target.pre_model_load_memory += nbytes / (1 << 30)
