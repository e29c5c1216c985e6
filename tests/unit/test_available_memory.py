"""How much may be allocated: the machine's answer and every control group's, on made-up procfs trees (D17)."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchwcache.memory.available import available_nbytes

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root / "proc"


def meminfo(available: int) -> str:
    return f"MemTotal:       {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable:   {available // 1024} kB\nHugePages_Total:  0\n"


def mount(root: Path, version: int, seen: str = "/") -> str:
    kind = "cgroup2 cgroup rw" if version == 2 else "cgroup cgroup rw,memory"
    return f"30 20 0:26 {seen} {root}/cg rw,nosuid shared:4 - {kind}\n22 1 0:2 / /proc rw - proc proc rw\n"


def test_machine_alone(tmp_path: Path) -> None:
    proc = tree(tmp_path, {"proc/meminfo": meminfo(40 * GIB), "proc/self/cgroup": "0::/\n", "proc/self/mountinfo": ""})
    assert available_nbytes(proc=proc) == 39 * GIB  # 1 GiB of reserve
    assert 0 < available_nbytes() < 1 << 50


def test_v2_walks_up_the_hierarchy(tmp_path: Path) -> None:
    proc = tree(
        tmp_path,
        {
            "proc/meminfo": meminfo(40 * GIB),
            "proc/self/cgroup": "0::/pod/box\n",
            "proc/self/mountinfo": mount(tmp_path, 2),
            "cg/pod/memory.max": f"{8 * GIB}\n",
            "cg/pod/memory.current": f"{5 * GIB}\n",
            "cg/pod/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nactive_file {GIB}\n",
            "cg/pod/box/memory.max": "max\n",
            "cg/pod/box/memory.current": f"{5 * GIB}\n",
        },
    )
    assert available_nbytes(proc=proc) == 5 * GIB - 8 * GIB // 32


def test_v1_counts_inactive_file_of_the_whole_subtree(tmp_path: Path) -> None:
    proc = tree(
        tmp_path,
        {
            "proc/meminfo": meminfo(40 * GIB),
            "proc/self/cgroup": "4:cpu,memory:/job\n3:cpuset:/other\n",
            "proc/self/mountinfo": mount(tmp_path, 1),
            "cg/memory.limit_in_bytes": f"{2**63 - 4096}\n",
            "cg/memory.usage_in_bytes": "1\n",
            "cg/job/memory.limit_in_bytes": f"{4 * GIB}\n",
            "cg/job/memory.usage_in_bytes": f"{3 * GIB}\n",
            "cg/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
        },
    )
    assert available_nbytes(proc=proc) == 2 * GIB - 4 * GIB // 32


@pytest.mark.parametrize("path", ["/docker/abc", "/../../elsewhere", "/docker/abc/gone"])
def test_container_sees_its_own_group_as_the_root(tmp_path: Path, path: str) -> None:
    proc = tree(
        tmp_path,
        {
            "proc/meminfo": meminfo(40 * GIB),
            "proc/self/cgroup": f"0::{path}\n",
            "proc/self/mountinfo": mount(tmp_path, 2, seen="/docker/abc"),
            "cg/memory.max": f"{4 * GIB}\n",
            "cg/memory.current": f"{GIB}\n",
        },
    )
    assert available_nbytes(proc=proc) == 3 * GIB - 4 * GIB // 32


def test_never_negative(tmp_path: Path) -> None:
    proc = tree(tmp_path, {"proc/meminfo": meminfo(0)})
    assert available_nbytes(proc=proc) == 0
