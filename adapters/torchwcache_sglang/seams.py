"""Which releases of SGLang are known, and whether the one that is installed loads as those do.

What is published is what SGLang's loader made. A release whose loader was never looked at may do in another place what belongs to a
finished model, and then it must not be published. So the text of the functions that load and finish a model is digested; comments
and blank lines do not count.
"""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Iterable
from importlib import metadata
from typing import Any

__all__ = ["KNOWN", "OLDEST", "check", "digest_of", "installed_version", "loader_functions"]

OLDEST, NEWEST = (0, 5, 17), (0, 5, 23)

KNOWN: dict[str, str] = {
    "0.5.17": "5d01d9cb87bec6cd",
    "0.5.18": "382c50c199db7680",
    "0.5.19": "382c50c199db7680",
    "0.5.20": "596add13efb47500",
    "0.5.21": "81c905769db219d5",
    "0.5.22": "95269b5be60d687e",
    "0.5.23": "b18a514ce0929692",
}
"""Digest of the loading functions by release."""

_METHODS = ("load_model", "load_weights_and_postprocess", "load_weights_only", "postprocess_weights")
_FUNCTIONS = ("post_load_weights", "_modules_with_quant_method")


def installed_version() -> str:
    """SGLang's version, or ``""`` when it is not installed as a distribution."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    found = []
    for part in version.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)


def digest_of(sources: Iterable[tuple[str, str]]) -> str:
    """Digest named pieces of source text."""
    lines = []
    for name, text in sources:
        lines.append(f"== {name}")
        for line in textwrap.dedent(text).splitlines():
            if line.strip() and not line.strip().startswith("#"):
                lines.append(line.rstrip())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def loader_functions(module: Any) -> list[tuple[str, str]]:
    """The text of the functions that load and finish a model, as far as this release has them."""
    found = []
    for owner, names in ((module.DefaultModelLoader, _METHODS), (module, _FUNCTIONS)):
        for name in names:
            function = owner.__dict__.get(name)
            if function is not None:
                found.append((name, inspect.getsource(inspect.unwrap(getattr(function, "__func__", function)))))
    return found


def check() -> tuple[str, str]:
    """Look at the installed release.

    Returns:
        What to warn of, and why nothing may be published; each is empty when there is nothing to say.
    """
    from sglang.srt.model_loader import loader

    version = installed_version()
    numbers = _numbers(version)
    warning = ""
    if not OLDEST <= numbers <= NEWEST:
        known = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
        warning = f"SGLang {version or 'of an unknown version'} is not one of those that torchwcache was written for ({known})"
    for name, wanted in (("_initialize_model", ("model_config", "load_config")), ("_get_quantization_config", ("model_config",))):
        function = getattr(loader, name, None)
        if function is None or not set(wanted) <= set(inspect.signature(function).parameters):
            return (
                warning,
                f"SGLang {version} has no function {name}({', '.join(wanted)}), by which a model is built without weights",
            )
    try:
        digest = digest_of(loader_functions(loader))
    except (OSError, TypeError) as error:
        return warning, f"the source of SGLang's loader cannot be read: {error}"
    if digest not in KNOWN.values():
        return warning, (
            f"the loader of SGLang {version} is none that torchwcache knows (digest {digest}): it may finish models in another "
            "way; upgrade torchwcache"
        )
    return warning, ""
