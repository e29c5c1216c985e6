"""Every Python block in the README and the documentation runs, in the order in which it is read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def script_of(page: Path) -> str:
    """The page's blocks as one script, on the lines where they are in the page, so that a traceback points there."""
    text = page.read_text()
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        start = text[: block.start(1)].count("\n")
        code = block[1].splitlines()
        lines[start : start + len(code)] = code
    return "\n".join(lines).rstrip() + "\n"


@pytest.fixture(scope="session")
def my_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that the pages speak of."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("docs") / "my-llama"
    subprocess.run([sys.executable, "-m", "torchwcache.cli.demo_worker", str(folder), "--make-tiny"], check=True, timeout=120)
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda page: page.stem)
def test_blocks_run(page: Path, my_llama: Path, tmp_path: Path, private_socket: str) -> None:
    (tmp_path / "my-llama").symlink_to(my_llama)
    script = tmp_path / f"{page.stem.lower()}_blocks.py"
    script.write_text(script_of(page))
    ran = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_pages_have_blocks() -> None:
    assert {page.stem for page in PAGES if BLOCK.search(page.read_text())} >= {"README", "index", "quickstart"}


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []
