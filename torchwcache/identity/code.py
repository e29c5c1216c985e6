"""Digests of code (design D2): what a callable or a class does, as far as Python can tell. Imports no torch.

The code objects that are actually loaded are digested, not their source: names, constants and instructions, without file names and
line numbers. What they refer to follows: defaults, closures, and the globals they name, as far as these are the user's. Code of a
versioned distribution is named by its version.

Everything reachable from the start is numbered in the order of discovery, and the digest is over one record for each, with numbers
in place of references. So cycles need no special case, and the result does not depend on what was digested before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchwcache.encoding import canonical_bytes, encode
from torchwcache.errors import EncodingError, FingerprintError
from torchwcache.identity.codegraph import Graph
from torchwcache.identity.origin import PYTHON, origin_of_object

if TYPE_CHECKING:
    from torch import nn

    from torchwcache.config import Build

__all__ = ["digest_callable", "digest_class", "tree_code_fields"]


def digest_callable(obj: Build, code_version: str | None = None, *, what: str = "build") -> tuple[str, ...]:
    """Identify a function, lambda, partial, bound method, class, callable instance or builtin.

    Args:
        obj: The callable, or its ``"package.module:name"``.
        code_version: The user's own version: with it, what cannot be digested is left out instead of refused.
        what: What the callable is to the user, for errors.

    Returns:
        ``("distribution", name, version, "module:qualname")``, ``("python", version, ...)``, or ``("code", digest)``.

    Raises:
        FingerprintError: Something that decides what it does has no canonical form; the message says what, where, and what to do.
        ConfigError: The name cannot be imported.
    """
    target: Any = obj
    if isinstance(obj, str):
        from torchwcache.module.construct import resolve_callable

        target = resolve_callable(obj, what)
    graph = Graph(soft=code_version is not None)
    start = graph.value(target, what)
    if isinstance(start, tuple) and start and start[0] in ("distribution", "python"):
        return tuple(str(item) for item in start)
    graph.run()
    return ("code", _digest([PYTHON, start, *graph.records], what))


def digest_class(cls: type) -> tuple[str, ...]:
    """Identify a class of a module tree by the code of itself and of its bases.

    Returns:
        As :func:`digest_callable`. Opaque values that its code names are left out: nothing is refused.
    """
    return digest_callable(cls, "", what=f"{cls.__module__}:{cls.__qualname__}")


def tree_code_fields(module: nn.Module) -> dict[str, Any]:
    """Identify the code behind every class in a module tree.

    Returns:
        ``classes``: a digest of every class of the user's own, by name, bases included. ``helpers``: one digest of everything
        that they refer to. ``distributions``: versions of the distributions that the other classes come from.
    """
    distributions: dict[str, str] = {}
    own: list[type] = []
    for kind in dict.fromkeys(type(child) for child in module.modules()):
        origins = [origin_of_object(base) for base in kind.__mro__]
        if None in origins:
            own.append(kind)
        distributions.update((origin[1], origin[2]) for origin in origins if origin is not None and origin[0] == "distribution")
    graph = Graph(soft=True)
    starts = [graph.value(kind, kind.__qualname__) for kind in own]
    graph.run()
    classes = {graph.labels[i]: _digest(graph.readable(i), graph.labels[i]) for i in graph.classes()}
    return {
        "python": PYTHON,
        "classes": classes,
        "helpers": _digest([PYTHON, starts, *graph.records], "helpers"),
        "distributions": distributions,
    }


def _digest(record: object, what: str) -> str:
    import xxhash

    try:
        return xxhash.xxh3_128_hexdigest(canonical_bytes(encode(record, path=what)))
    except EncodingError as error:  # nested beyond what the encoding allows
        raise FingerprintError(f"{what}: its code cannot be identified: {error}", path=what) from error
