"""How much memory may still be taken: the machine's own answer, and that of every control group above this process.

Imports no torch. A container's limit is invisible in ``/proc/meminfo``, and going over it ends in the OOM killer, not in an
exception: so both are asked before a segment is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_nbytes"]

_RESERVE_SHARE = 32
_RESERVE_MAX_NBYTES = 1 << 30
_V1_UNLIMITED = 1 << 60
"""Cgroup v1 writes "no limit" as the largest page-aligned int64; nothing near it is a limit anybody set."""


def available_nbytes(*, proc: Path = Path("/proc")) -> int:
    """Bytes that can be allocated now without pushing the machine, or a control group, over its limit.

    The smallest of ``MemAvailable`` and of what each memory control group from this process's own up to the root leaves, where
    page cache that has not been used again (``inactive_file``) counts as free: the kernel drops it before it kills anybody. A
    small reserve is kept back (1/32 of the limit, at most 1 GiB), so that the process that fills the last segment can still work.

    Args:
        proc: Where procfs is mounted.
    """
    meminfo = _fields(proc / "meminfo")
    rooms = [_less_reserve(1024 * meminfo.get("MemAvailable", 0), 1024 * meminfo.get("MemTotal", 0))]
    for folder, version in _memory_cgroups(proc):
        limit, used, stat_key = _FILES[version]
        ceiling = _number(folder / limit)
        usage = _number(folder / used)
        if ceiling is None or usage is None or ceiling >= _V1_UNLIMITED:
            continue
        rooms.append(_less_reserve(ceiling - usage + _fields(folder / "memory.stat").get(stat_key, 0), ceiling))
    return max(0, min(rooms))


_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def _less_reserve(room: int, limit: int) -> int:
    return room - min(limit // _RESERVE_SHARE, _RESERVE_MAX_NBYTES)


def _memory_cgroups(proc: Path) -> Iterator[tuple[Path, int]]:
    """Every memory control group that this process is in, its own first, with the version of its interface."""
    mounts = list(_cgroup_mounts(proc))
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        for mount_version, root, mount_point in mounts:
            if mount_version != version:
                continue
            folder = _inside(path, root, mount_point)
            while folder.is_relative_to(mount_point):
                yield folder, version
                folder = folder.parent


def _inside(path: str, root: str, mount_point: Path) -> Path:
    """Where a control group's folder is, given which of them is mounted here.

    A container often sees its own group as the root of the mount while ``/proc/self/cgroup`` still gives the path from the host's
    root: then that prefix is cut off, and a path that is not below the mount at all stands for the mount itself.
    """
    inner = Path(path)
    if inner.is_relative_to(root):
        folder = mount_point / inner.relative_to(root)
        if ".." not in folder.parts and folder.is_dir():
            return folder
    return mount_point


def _cgroup_mounts(proc: Path) -> Iterator[tuple[int, str, Path]]:
    """Version, root and mount point of every mount that holds memory control groups (see ``proc_pid_mountinfo(5)``)."""
    for line in _lines(proc / "self" / "mountinfo"):
        mount, _, filesystem = line.partition(" - ")
        fields, kind = mount.split(), filesystem.split()
        if len(fields) < 5 or not kind:
            continue
        if kind[0] == "cgroup2":
            yield 2, fields[3], Path(fields[4])
        elif kind[0] == "cgroup" and "memory" in kind[-1].split(","):
            yield 1, fields[3], Path(fields[4])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no such file in this kernel, or hidden by the container
        return []


def _fields(path: Path) -> dict[str, int]:
    pairs = (line.replace(":", " ").split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None  # cgroup v2 writes "max" for no limit
