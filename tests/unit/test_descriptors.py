"""A larger table of descriptors: made once, in time, and without leaving anything open."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

from torchwcache.wire.descriptors import widen_table

SCRIPT = """
import os
from pathlib import Path
from torchwcache.wire.descriptors import widen_table

def room():
    return int(Path("/proc/self/status").read_text().partition("FDSize:")[2].split()[0])

before, opened = room(), len(os.listdir("/proc/self/fd"))
widen_table(512).join(20)
print(before, room(), len(os.listdir("/proc/self/fd")) - opened)
"""


def test_the_table_grows_and_nothing_stays_open() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    before, after, opened = map(int, done.stdout.split())
    assert before < 512 <= after
    assert opened == 0


def test_a_limit_is_no_error() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(400, hard), hard))
    try:
        widen_table(512).join(20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == files
