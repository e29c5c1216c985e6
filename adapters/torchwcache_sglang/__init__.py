"""SGLang starts from the cache: a plugin (entry-point group ``sglang.srt.plugins``) that puts a loader around SGLang's own."""

from __future__ import annotations

from torchwcache_sglang.plugin import register

__all__ = ["register"]
