"""vLLM starts from the cache: ``--load-format torchwcache``."""

from torchwcache_vllm.plugin import register

__all__ = ["register"]
