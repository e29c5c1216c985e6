"""What SGLang has resolved in this process, read for the fingerprint."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from torchwcache_sglang.canonical import plain, resolved_path
from torchwcache_sglang.options import NEUTRAL

__all__ = ["environment_names", "option", "option_names", "parallel_layout", "resolved_options"]

_LAYOUT = (
    "tp", "pp", "moe_ep", "moe_tp", "moe_dp", "attn_tp", "attn_dp", "attn_cp", "dcp", "attn_dcp",
)  # fmt: skip

_NEUTRAL_VARIABLES = (
    "SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_PLUGINS", "SGLANG_RUN_ID", "SGLANG_LOG*", "SGLANG_*LOG_LEVEL*", "SGLANG_*PROFIL*",
    "SGLANG_*TIMEOUT*", "SGLANG_*_PORT*", "SGLANG_*_HOST*", "SGLANG_HOST_IP", "SGLANG_PORT", "SGLANG_*CACHE_DIR*",
    "SGLANG_*_DIR", "SGLANG_TEST_*", "SGLANG_CI_*", "SGLANG_IS_IN_CI*", "SGLANG_RECORD_*", "SGLANG_SORT_WEIGHT_FILES",
    "SGLANG_USE_MODELSCOPE", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "SGLANG_*METRIC*", "SGLANG_WEIGHT_CACHE_*",
    "FLASHINFER_*DIR*", "FLASHINFER_*WORKSPACE*", "FLASHINFER_*LOG*", "DG_*CACHE*", "SGLANG_BLOCK_NONZERO_RANK_CHILDREN",
    "SGLANG_DEBUG*", "SGLANG_*DUMP*", "SGLANG_HEALTH_CHECK*", "SGLANG_API_KEY*",
)  # fmt: skip
"""Variables that change neither weights nor modules. Others of SGLang's count as soon as they are set."""


def resolved_options(source: str) -> dict[str, Any]:
    """SGLang's options as it resolved them, without the neutral ones.

    Args:
        source: The model's resolved path: options that only repeat it say nothing.
    """
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.runtime_context import get_context, get_server_args

    context, arguments = get_context(), get_server_args()
    found: dict[str, Any] = {}
    places = namespace_of(type(arguments))
    for name in option_names(arguments):
        if name in NEUTRAL:
            continue
        value = _leaf(context, places.get(name), name, getattr(arguments, name, None))
        if name == "tokenizer_path" and (value is None or resolved_path(str(value)) == source):
            value = None
        found[name] = plain(value)
    return found


def option(name: str, otherwise: Any = None) -> Any:
    """One option as SGLang resolved it; ``otherwise`` in a release that has no such option, or before anything is published."""
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.runtime_context import get_context, get_server_args

    try:
        arguments = get_server_args()
    except ValueError:
        return otherwise
    if name not in option_names(arguments):
        return otherwise
    return _leaf(get_context(), namespace_of(type(arguments)).get(name), name, getattr(arguments, name, otherwise))


def option_names(arguments: Any) -> list[str]:
    """All options of a ``ServerArgs``, in whichever way its release declares them."""
    kind = type(arguments)
    fields: Iterable[str] = getattr(kind, "__dataclass_fields__", ()) or getattr(kind, "__struct_fields__", ())
    return [name for name in fields if not name.startswith("__")]


def _leaf(context: Any, place: str | None, name: str, otherwise: Any) -> Any:
    if place is None:
        return otherwise
    first, *rest = place.split(".")
    try:
        if first == "parallel":
            from sglang.srt.runtime_context import get_parallel

            return getattr(get_parallel(), name)
        bag = context.config_bag(first)
        for segment in rest:
            bag = getattr(bag, segment)
        return getattr(bag, name)
    except (AssertionError, AttributeError, RuntimeError, ValueError):
        return otherwise


def parallel_layout() -> dict[str, int | None]:
    """Sizes and ranks of every axis that SGLang splits a model along, as far as this release has them."""
    from sglang.srt.runtime_context import get_parallel

    layout: dict[str, int | None] = {}
    for axis in _LAYOUT:
        for what in ("size", "rank"):
            try:
                value = getattr(get_parallel(), f"{axis}_{what}")
            except (AttributeError, RuntimeError, ValueError, AssertionError):
                value = None
            layout[f"{axis}_{what}"] = int(value) if isinstance(value, int) else None
    return layout


def environment_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """SGLang's own variables that are set and not known to be neutral."""
    return tuple(
        sorted(
            name
            for name in environ
            if name.startswith(("SGLANG_", "SGL_", "DG_", "FLASHINFER_"))
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in _NEUTRAL_VARIABLES)
        )
    )
