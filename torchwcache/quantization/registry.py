"""The gate: only quantization methods on the allow-list are cached. Imports no torch.

It is passed twice: on the config, before anything is loaded, and on the module's real tensors, before anything is published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchwcache.errors import PluginError, UnsupportedQuantizationError
from torchwcache.plugins import Registry
from torchwcache.quantization.base import QuantizationMethod
from torchwcache.quantization.refused import reason_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["METHODS", "VERIFIED", "check_config", "check_tensors", "refuse", "stated_method"]

METHODS: Registry[QuantizationMethod] = Registry("torchwcache.quantization")
"""Every method that is installed."""

VERIFIED = ("fp8", "unquantized")
"""The allow-list: methods that torchwcache brings and tests itself. Any other is off until the user names it."""


def check_config(quantization_config: Mapping[str, Any] | None, requested: str | None = None) -> str:
    """Find the method by what the checkpoint's config states and what the user asked for.

    Args:
        quantization_config: As the loader found it, or ``None``.
        requested: ``ModelConfig.quantization``.

    Returns:
        The method's name.

    Raises:
        UnsupportedQuantizationError: It is not on the allow-list, or is not the one that was asked for.
        PluginError: Two distributions claim the method's name, or it cannot be imported.
    """
    stated = stated_method(quantization_config)
    for name in VERIFIED if requested is None else (requested,):
        method = _method(name, quantization_config)
        if method.accepts(quantization_config):
            return method.name
        if requested is not None and not quantization_config and getattr(method, "quantizes", False):
            return method.name
    if requested is None:
        raise refuse(stated, None, reason_of(quantization_config))
    if requested == "fp8" and stated.partition(" ")[0] in ("fp8", "compressed-tensors"):
        raise refuse(stated, None, reason_of(quantization_config))
    raise refuse(stated, None, f"{requested!r} was asked for, but the checkpoint's config states {stated!r}")


def _method(name: str, quantization_config: Mapping[str, Any] | None) -> QuantizationMethod:
    try:
        method = METHODS.get(name)
    except PluginError as error:
        if name not in METHODS.names():
            raise refuse(name, None, reason_of(quantization_config or {"quant_method": name})) from error
        raise
    evidence = getattr(method, "evidence", None)
    if not isinstance(evidence, str) or not evidence.strip():
        raise refuse(name, None, "the plugin that provides it names no evidence (the id of a parity run)")
    return method


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


def check_tensors(method: str, module: nn.Module, quantization_config: Mapping[str, Any] | None = None) -> None:
    """Let the method look at the loaded module's tensors.

    Args:
        method: Its name.
        module: As loaded.
        quantization_config: What the checkpoint's config states.

    Raises:
        UnsupportedQuantizationError: The tensors tell of another method; names the module or tensor.
    """
    METHODS.get(method).check_tensors(module, quantization_config)


def refuse(method: str, module: str | None, reason: str) -> UnsupportedQuantizationError:
    """The error of a refusal: what was found, where, why it is refused, what is verified, and the way out."""
    where = f" at {module!r}" if module is not None else ""
    others = sorted(set(METHODS.names()) - set(VERIFIED))
    plugins = f" (installed, and off until named with ModelConfig(quantization=...): {', '.join(others)})" if others else ""
    return UnsupportedQuantizationError(
        f"quantization {method!r}{where} cannot be cached: {reason}. Verified methods: {', '.join(VERIFIED)}{plugins}. Serve this "
        'model without the cache (on_refused="load" or mode="off"), or dequantize the checkpoint',
        method=method,
        module=module,
        verified=VERIFIED,
    )
