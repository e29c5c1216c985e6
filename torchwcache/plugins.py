"""Find loaders, adapters and quantization methods through entry points. Imports no torch.

Nothing is imported before it is asked for by name, an absent name is an error that lists what there is, and two plugins of one
name are an error that names both: never a guess.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torchwcache.errors import PluginError

if TYPE_CHECKING:
    from torchwcache.adapter import Adapter

__all__ = ["ADAPTERS", "Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """The plugins of one entry-point group.

    Args:
        group: Such as ``"torchwcache.loaders"``.
    """

    def __init__(self, group: str) -> None:
        self.group = group
        self._lock = threading.RLock()
        self._registered: dict[str, T] = {}
        self._loaded: dict[str, T] = {}
        self._entry_points: dict[str, list[metadata.EntryPoint]] | None = None

    def names(self) -> tuple[str, ...]:
        """All names, sorted. Imports nothing."""
        with self._lock:
            return tuple(sorted({*self._found(), *self._registered}))

    def get(self, name: str) -> T:
        """The plugin of that name; a class is instantiated once.

        Raises:
            PluginError: There is no such plugin, there are two, or it cannot be imported (``__cause__`` says why).
        """
        with self._lock:
            candidates = self._found().get(name, [])
            if len(candidates) + (name in self._registered) > 1:
                self._clash(name, candidates)
            if name in self._registered:
                return self._registered[name]
            if not candidates:
                there = ", ".join(self.names()) or "none"
                raise PluginError(
                    f"{self.group}: there is no {name!r}; installed: {there}. Install the distribution that provides it, or "
                    "register it",
                    group=self.group,
                    name=name,
                )
            if name not in self._loaded:
                self._loaded[name] = self._load(name, candidates[0])
            return self._loaded[name]

    def register(self, name: str, plugin: T) -> None:
        """Add a plugin by hand, for this process.

        Raises:
            PluginError: The name is taken by another plugin.
        """
        with self._lock:
            if self._registered.get(name) is plugin:
                return
            if name in self._registered:
                raise PluginError(
                    f"{self.group}: {name!r} is registered as {self._registered[name]!r} already; cannot be {plugin!r} too",
                    group=self.group,
                    name=name,
                )
            if candidates := self._found().get(name, []):
                raise PluginError(
                    f"{self.group}: {name!r} is provided by {_describe(candidates[0])}; cannot be {plugin!r} too",
                    group=self.group,
                    name=name,
                )
            self._registered[name] = plugin

    def unregister(self, name: str) -> None:
        """Take back what :meth:`register` added. Unknown names are ignored."""
        with self._lock:
            self._registered.pop(name, None)

    def _found(self) -> dict[str, list[metadata.EntryPoint]]:
        if self._entry_points is None:
            by_name: dict[str, list[metadata.EntryPoint]] = {}
            for entry_point in _entry_points(self.group, tuple(sys.path)):
                same_name = by_name.setdefault(entry_point.name, [])
                # One distribution seen through two folders of sys.path is still one plugin.
                if _describe(entry_point) not in map(_describe, same_name):
                    same_name.append(entry_point)
            self._entry_points = by_name
        return self._entry_points

    def _clash(self, name: str, candidates: list[metadata.EntryPoint]) -> None:
        sides = [_describe(candidate) for candidate in candidates]
        if name in self._registered:
            sides.append(f"{self._registered[name]!r}, registered in this process")
        raise PluginError(
            f"{self.group}: {name!r} is claimed by {' and by '.join(sides)}; uninstall or rename one of them",
            group=self.group,
            name=name,
        )

    def _load(self, name: str, entry_point: metadata.EntryPoint) -> T:
        try:
            loaded: Any = entry_point.load()
            plugin = loaded() if isinstance(loaded, type) else loaded
        except Exception as error:  # foreign code: whatever it raises, the caller must learn whose it is
            raise PluginError(
                f"{self.group}: {name!r} ({_describe(entry_point)}) cannot be loaded: {type(error).__name__}: {error}",
                group=self.group,
                name=name,
            ) from error
        called = getattr(plugin, "name", name)
        if called != name:
            raise PluginError(
                f"{self.group}: {_describe(entry_point)} is installed as {name!r}, but calls itself {called!r}",
                group=self.group,
                name=name,
            )
        return plugin  # type: ignore[no-any-return]


def _entry_points(group: str, path: tuple[str, ...]) -> Iterable[metadata.EntryPoint]:
    return _all_entry_points(path).select(group=group)


@lru_cache(maxsize=1)
def _all_entry_points(path: tuple[str, ...]) -> metadata.SelectableGroups | metadata.EntryPoints:
    """Those of every group: asking for one group reads the files of every distribution just as well, for each registry anew."""
    return metadata.entry_points()


def _describe(entry_point: metadata.EntryPoint) -> str:
    distribution = entry_point.dist
    owner = f"{distribution.name} {distribution.version}" if distribution is not None else "an unknown distribution"
    return f"{entry_point.value!r} of {owner}"


ADAPTERS: Registry[Adapter] = Registry("torchwcache.adapters")
"""All adapters."""
