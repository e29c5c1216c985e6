"""What vLLM calls in each of its processes (entry-point group ``vllm.general_plugins``)."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Make ``--load-format torchwcache`` known. vLLM may call it more than once in a process."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    from torchwcache_vllm.loader import LOAD_FORMAT, TorchwcacheModelLoader

    if _LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not TorchwcacheModelLoader:
        register_model_loader(LOAD_FORMAT)(TorchwcacheModelLoader)
