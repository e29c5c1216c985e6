"""The guards on what the engine is asked, in processes in which SGLang runs no plugins: those of ``--tokenizer-worker-num``.

They are spawned by the web server, and get their arguments through shared memory, pickled. So the arguments bring the guards along:
unpickling them puts the guards up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchwcache_sglang.guards import CALLER_GUARDS
from torchwcache_sglang.settings import options_from, split_extra_config

__all__ = ["WRITE_ARGUMENTS", "around_write", "with_guards"]

WRITE_ARGUMENTS = "sglang.srt.managers.multi_tokenizer_mixin.write_to_shared_memory"


class _Guarded:
    """Pickled in place of its content, and unpickled as its content."""

    def __init__(self, content: Any) -> None:
        self._content = content

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return with_guards, (self._content,)


def around_write(original: Callable[..., Any], obj: Any, *args: Any, **kwargs: Any) -> Any:
    """``write_to_shared_memory``: with the guards, when the cache was asked for; else as it is."""
    return original(_Guarded(obj) if _asked(obj) else obj, *args, **kwargs)


def _asked(content: Any) -> bool:
    for part in content if isinstance(content, tuple) else ():
        if hasattr(part, "model_loader_extra_config"):
            return options_from(split_extra_config(part.model_loader_extra_config)[0]) is not None
    return False


def with_guards(content: Any) -> Any:
    """Called in a tokenizer worker, by pickle."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in CALLER_GUARDS.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()  # nobody else calls it in such a process, and a second time it does nothing
    return content
