"""Install a built wheel into an empty environment and use it there: what users get is the wheel, not the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

USE = """
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import torchwcache
import torchwcache_nn
from torchwcache import ModelConfig

for module in (torchwcache, torchwcache_nn):
    assert Path(module.__file__).is_relative_to(sys.prefix), module.__file__
assert version("torchwcache") == sys.argv[1]
assert "nn" in entry_points(group="torchwcache.adapters").names
ModelConfig("checkpoint")
"""


PACKAGES = ("torchwcache", "torchwcache_nn", "torchwcache_sglang", "torchwcache_vllm")


def check_names(wheel: Path) -> str:
    """The wheel holds the packages, their type markers and the license, and nothing else; returns its version."""
    names = zipfile.ZipFile(wheel).namelist()
    version = wheel.name.split("-")[1]
    folders = {name.split("/")[0] for name in names}
    assert folders == {*PACKAGES, f"torchwcache-{version}.dist-info"}, folders
    for needed in (*(f"{package}/py.typed" for package in PACKAGES), f"torchwcache-{version}.dist-info/licenses/LICENSE"):
        assert needed in names, f"{needed} is missing"
    return version


def main(wheel: Path) -> None:
    """Check one wheel."""
    version = check_names(wheel)
    with tempfile.TemporaryDirectory(prefix="torchwcache-wheel-") as folder:
        home = Path(folder, "venv")
        venv.create(home, with_pip=False)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(home / "bin" / "python")]
        subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel.resolve())], check=True)
        # The dependencies are borrowed from this environment. Its own editable torchwcache is not: a .pth file within a folder
        # that a .pth file names is not read.
        python = home / "bin" / "python"
        query = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        site = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
        Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([python, "-c", USE, version], check=True, cwd=folder, env=environ)
        for command in ([home / "bin" / "torchwcache"], [python, "-m", "torchwcache"]):
            shown = subprocess.run([*command, "--version"], check=True, cwd=folder, env=environ, capture_output=True, text=True)
            assert version in shown.stdout, shown.stdout
        subprocess.run([home / "bin" / "torchwcache", "demo", "--tiny"], check=True, cwd=folder, env=environ)
    print(f"{wheel.name}: installs and works")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
