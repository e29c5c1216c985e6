"""What else ends a daemon's life, besides being stopped (D17)."""

from __future__ import annotations

import os
import re

__all__ = ["shared_lifetime"]

_CONTAINER_FILES = (".dockerenv", "run/.containerenv")
_CONTAINER_GROUPS = re.compile(r"docker|kubepods|containerd|libpod|lxc")
_REMEDY = "Run `torchwcache daemon` as a service of its own, and share nothing but its socket's folder (TORCHWCACHE_SOCKET)"


def shared_lifetime(*, root: str = "/") -> tuple[str, ...]:
    """Warnings for a daemon that an engine starts here: a new session and process group do not leave a container or systemd unit.

    Args:
        root: Where the file system begins.

    Returns:
        One text for the container, one for the unit, as far as there are any.
    """
    groups = _control_groups(os.path.join(root, "proc/self/cgroup"))
    marks = [name for name in _CONTAINER_FILES if os.path.exists(os.path.join(root, name))]
    marks += [group for group in groups if _CONTAINER_GROUPS.search(group)]
    warnings = []
    if marks:
        warnings.append(
            f"the daemon was started inside a container (seen by {marks[0]}) and ends with it, and so does the whole cache."
            f" {_REMEDY}"
        )
    units = [part for group in groups for part in group.split("/") if part.endswith((".service", ".scope"))]
    if units:
        warnings.append(
            f"the daemon shares the systemd unit {units[-1]} with its starter: stopping the unit stops it too. {_REMEDY}"
        )
    return tuple(warnings)


def _control_groups(path: str) -> list[str]:
    """Paths in the unified hierarchy and in systemd's own (version 1): the ones that systemd kills by."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return []
    return [parts[2] for parts in lines if len(parts) == 3 and parts[1] in ("", "name=systemd")]
