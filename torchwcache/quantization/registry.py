"""The gate: only quantization methods on the allow-list are cached. Imports no torch.

It is passed twice: on the config, before anything is loaded, and on the module's real tensors, before anything is published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchwcache.errors import PluginError, UnsupportedQuantizationError
from torchwcache.plugins import Registry
from torchwcache.quantization.base import QuantizationMethod

if TYPE_CHECKING:
    from torch import nn

__all__ = ["METHODS", "check_config", "check_tensors", "refuse", "stated_method"]

METHODS: Registry[QuantizationMethod] = Registry("torchwcache.quantization")
"""The allow-list."""


def check_config(quantization_config: Mapping[str, Any] | None, requested: str | None = None) -> str:
    """Find the method by what the checkpoint's config states and what the user asked for.

    Args:
        quantization_config: As the loader found it, or ``None``.
        requested: ``ModelConfig.quantization``.

    Returns:
        The method's name.

    Raises:
        UnsupportedQuantizationError: It is not on the allow-list, or is not the one that was asked for.
    """
    stated = stated_method(quantization_config)
    names = (requested,) if requested is not None else METHODS.names()
    for name in names:
        try:
            method = METHODS.get(name)
        except PluginError as error:
            if name not in METHODS.names():
                raise refuse(name, None, "it is not on the list of methods that may be cached") from error
            raise
        if method.accepts(quantization_config):
            return method.name
    if requested is not None:
        raise refuse(stated, None, f"{requested!r} was asked for, but the checkpoint's config states {stated!r}")
    raise refuse(stated, None, "it is not on the list of methods that may be cached")


def stated_method(quantization_config: Mapping[str, Any] | None) -> str:
    """The method's name as a config states it, with the format where one name covers several."""
    if not quantization_config:
        return "unquantized"
    name = quantization_config.get("quant_method") or quantization_config.get("quantization_method")
    if name is None:
        # bitsandbytes' configs from before the field existed
        bits = [key for key in ("load_in_4bit", "load_in_8bit") if quantization_config.get(key)]
        name = f"bitsandbytes ({bits[0]})" if bits else "an unnamed method"
    text = str(getattr(name, "value", name))
    layout = quantization_config.get("format") or quantization_config.get("quant_algo")
    return f"{text} ({layout})" if layout else text


def check_tensors(method: str, module: nn.Module) -> None:
    """Let the method look at the loaded module's tensors.

    Raises:
        UnsupportedQuantizationError: The tensors tell of another method; names the module or tensor.
    """
    METHODS.get(method).check_tensors(module)


def refuse(method: str, module: str | None, reason: str) -> UnsupportedQuantizationError:
    """The error of a refusal: what was found, where, why it is refused, what is verified, and the way out."""
    verified = METHODS.names()
    where = f" at {module!r}" if module is not None else ""
    return UnsupportedQuantizationError(
        f"quantization {method!r}{where} cannot be cached: {reason}. Verified methods: {', '.join(verified)}. Serve this model "
        'without the cache (on_refused="load" or mode="off"), or dequantize the checkpoint',
        method=method,
        module=module,
        verified=verified,
    )
