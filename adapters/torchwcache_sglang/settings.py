"""What a user asked for: the environment, and the key ``torchwcache`` in ``--model-loader-extra-config``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchwcache.config import Mode
from torchwcache.errors import ConfigError

if TYPE_CHECKING:
    from torchwcache.engine import EngineOptions

__all__ = ["KEY", "asked_by_environment", "options_from", "split_extra_config", "stops_on_failure"]

KEY = "torchwcache"


def asked_by_environment(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``TORCHWCACHE_MODE`` alone asks for the cache."""
    return environ.get("TORCHWCACHE_MODE", "") in (Mode.CLIENT.value, Mode.DAEMON.value)


def stops_on_failure(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether any fallback is an error, as far as the environment says."""
    return environ.get("TORCHWCACHE_FALLBACK") == "error"


def split_extra_config(extra: object) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
    """Our part of the loader's extra options (``None`` when there is none), and SGLang's.

    Raises:
        ConfigError: Our part is not a mapping.
    """
    if isinstance(extra, str):
        extra = json.loads(extra) if extra.strip() else {}
    theirs = dict(extra) if isinstance(extra, Mapping) else {}
    ours = theirs.pop(KEY, None)
    if ours is True:
        ours = {}
    if ours is not None and not isinstance(ours, Mapping):
        raise ConfigError(f'--model-loader-extra-config: "{KEY}" must be a mapping of options, such as {{"mode": "daemon"}}')
    return ours, theirs


def options_from(ours: Mapping[str, Any] | None, environ: Mapping[str, str] = os.environ) -> EngineOptions | None:
    """The options in force, or ``None`` when the cache was not asked for.

    Raises:
        ConfigError: An option that we do not know, or a value that is not allowed.
    """
    if ours is None and not environ.get("TORCHWCACHE_MODE"):
        return None
    from torchwcache.engine import EngineOptions

    # Writing the key down is asking for the cache; without it only the environment can.
    default = Mode.OFF if ours is None else Mode.DAEMON
    options = EngineOptions.from_mapping(ours or {}, default_mode=default, environ=environ)
    return None if options.mode is Mode.OFF else options
