"""The one place that maps a device's name to its kind of memory; everything else holds a :class:`Memory`."""

from __future__ import annotations

from torchwcache.errors import ConfigError
from torchwcache.memory.base import Memory

__all__ = ["memory_for"]


def memory_for(device: str) -> Memory:
    """The memory of a device as the user names it (``ModelConfig.device``).

    Raises:
        ConfigError: There is no fd-backed memory for that device.
    """
    kind = device.partition(":")[0]
    if kind == "cpu":
        from torchwcache.memory.host import HostMemory

        return HostMemory()
    if kind == "cuda":
        from torchwcache.memory.cuda import CudaMemory

        return CudaMemory(device)
    raise ConfigError(f'device={device!r}: weights can be cached on "cpu" and on "cuda" devices')
