"""Whose code is it? Finding that out must not cost every start of a process the list of all that is installed."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from pathlib import Path

import _pytest
import pytest

from torchwcache.identity import origin

FULL_MAP = "the list of everything installed was read"


@pytest.fixture(autouse=True)
def forget() -> None:
    for function in (origin.origin_of, origin._holds_distributions, origin._packages, origin._named):
        function.cache_clear()


@pytest.fixture
def no_full_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "packages_distributions", lambda: pytest.fail(FULL_MAP))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def origin_of_source(path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> origin.Origin | None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module(name)
    try:
        return origin.origin_of(name)
    finally:
        del sys.modules[name]


@pytest.mark.parametrize("place", ["mine_alone.py", "mine_alone/__init__.py"])
@pytest.mark.usefixtures("no_full_map")
def test_a_file_beside_no_distribution_is_the_users(folder: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    assert origin_of_source(folder / place, monkeypatch, "mine_alone") is None


@pytest.mark.parametrize("place", ["brought_by_it.py", "brought_by_it/__init__.py"])
@pytest.mark.parametrize("info", ["other_name-1.5.dist-info", "other_name-1.5.egg-info"])
def test_one_that_a_distribution_of_another_name_brought(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, info: str
) -> None:
    (folder / info).mkdir()
    for name in ("METADATA", "PKG-INFO"):
        (folder / info / name).write_text("Metadata-Version: 2.1\nName: other_name\nVersion: 1.5\n")
    (folder / info / "top_level.txt").write_text("brought_by_it\n")
    assert origin_of_source(folder / place, monkeypatch, "brought_by_it") == ("distribution", "other_name", "1.5")


def test_a_package_that_is_installed_under_another_name() -> None:
    assert origin.origin_of(_pytest.__name__) == ("distribution", "pytest", metadata.version("pytest"))


def test_where_no_folder_can_be_listed_the_full_map_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "packages_distributions", lambda: pytest.fail(FULL_MAP))
    with pytest.raises(pytest.fail.Exception, match=FULL_MAP):
        origin._distribution("module", Path("/nowhere/archive.zip/module.py"))
