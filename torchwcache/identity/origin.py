"""Where code comes from: the standard library, a versioned distribution, or the user. Imports no torch.

Code of a versioned, non-editable distribution is named by that version. Everything else (scripts, ``__main__``, a checkpoint's own
code, editable installs, folders on ``PYTHONPATH``) is the user's, and is digested.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import sysconfig
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["PYTHON", "Origin", "origin_of", "origin_of_object"]

Origin: TypeAlias = tuple[str, ...]
"""``("python", version)`` or ``("distribution", name, version)``."""

PYTHON = f"{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"
"""Part of every digest: bytecode differs from one minor version to the next."""


def origin_of_object(obj: Any) -> Origin | None:
    """Where a class or function comes from; ``None``: from the user."""
    module = getattr(obj, "__module__", None)
    return origin_of(module) if isinstance(module, str) else None


@cache
def origin_of(module: str) -> Origin | None:
    """Where a module comes from; ``None``: from the user."""
    top = module.partition(".")[0]
    if top == "__main__":
        return None
    file = _file_of(module)
    if top in sys.stdlib_module_names and (file is None or _is_stdlib(file)):
        return ("python", PYTHON)
    if file is None:
        return None
    found = _distribution(top, file)
    if found is None or _is_editable(found):
        return None
    return ("distribution", *_name_and_version(found))


def _file_of(module: str) -> Path | None:
    # A namespace package has no file; any module that is looked up here has one, or is built in.
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    return Path(file).resolve() if isinstance(file, str) else None


@cache
def _stdlib_folders() -> tuple[Path, ...]:
    return tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))


def _is_stdlib(file: Path) -> bool:
    # A local file may shadow a standard module, and site-packages lies within the standard library's folder.
    third_party = {"site-packages", "dist-packages"}
    return any(file.is_relative_to(folder) for folder in _stdlib_folders()) and third_party.isdisjoint(file.parts)


def _distribution(top: str, file: Path) -> metadata.Distribution | None:
    """The distribution that installed ``file``. Tried first: the one of the same name, since the full map costs 0.2 s."""
    named = _named(top)
    if named is not None and _provides(named, top, file):
        return named
    if not _may_be_installed(top, file):
        return None
    candidates = [metadata.distribution(name) for name in sorted(set(_packages().get(top, ())))]
    candidates = [candidate for candidate in candidates if _provides(candidate, top, file)]
    if len(candidates) <= 1:
        return candidates[0] if candidates else None
    # Several distributions share a namespace package: only their lists of files can tell.
    owners = [item for item in candidates if any(_located(item, str(entry)) == file for entry in item.files or ())]
    return owners[0] if owners else None


def _may_be_installed(top: str, file: Path) -> bool:
    """Whether some distribution lies where the one that installed ``file`` would have to (see :func:`_provides`).

    It spares whoever attaches a model of their own the full map. A finder that keeps distributions somewhere else entirely is
    not asked: code that nobody is known to have versioned is digested.
    """
    roots = {file.parent, *(folder.parent for folder in file.parents if folder.name == top)}
    return any(_holds_distributions(root) for root in roots)


@cache
def _holds_distributions(folder: Path) -> bool:
    try:
        names = [name.lower() for name in os.listdir(folder)]
    except OSError:
        return True  # inside an archive, say: only the full map can tell
    return any(name.endswith((".dist-info", ".egg-info")) or name == "egg-info" for name in names)


@cache
def _named(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        return None


@cache
def _name_and_version(distribution: metadata.Distribution) -> tuple[str, str]:
    # Every access parses the whole metadata file, a README of a thousand lines included.
    parsed = distribution.metadata
    return parsed["Name"], parsed["Version"]


@cache
def _packages() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())


def _provides(distribution: metadata.Distribution, top: str, file: Path) -> bool:
    # A local folder that happens to be called like an installed distribution is not it.
    root = _located(distribution, "")
    return file.is_relative_to(root / top) or (file.parent == root and file.name.partition(".")[0] == top)


def _located(distribution: metadata.Distribution, path: str) -> Path:
    return Path(str(distribution.locate_file(path))).resolve()


@cache
def _is_editable(distribution: metadata.Distribution) -> bool:
    text = distribution.read_text("direct_url.json")
    if text is None:
        return False
    try:
        return bool(json.loads(text).get("dir_info", {}).get("editable", False))
    except (ValueError, AttributeError):
        return True  # not knowing is not versioned
