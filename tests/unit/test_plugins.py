"""The registries: lazy, and a clash or an absence is an error that says enough."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torchwcache.errors import PluginError
from torchwcache.plugins import Registry

GROUP = "torchwcache.test_plugins"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a distribution with one module and entry points, for this test."""

    def install(distribution: str, module: str, source: str, **entry_points: str) -> Path:
        site = tmp_path / distribution
        info = site / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"[{GROUP}]", *(f"{name} = {target}" for name, target in entry_points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        (site / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, module, raising=False)
        return site

    return install


SOURCE = "class P:\n    name = 'one'\n"


def test_nothing_is_imported_before_it_is_asked_for(install) -> None:
    install("first", "first_module", SOURCE, one="first_module:P", broken="no_such_module:P")
    registry: Registry[object] = Registry(GROUP)
    assert registry.names() == ("broken", "one")
    assert "first_module" not in sys.modules
    plugin = registry.get("one")
    assert type(plugin).__name__ == "P"
    assert registry.get("one") is plugin


def test_an_instance_may_be_registered_too(install) -> None:
    install("first", "first_module", SOURCE + "p = P()\n", one="first_module:p")
    assert Registry(GROUP).get("one") is sys.modules["first_module"].p


def test_an_absent_name_lists_what_there_is(install) -> None:
    install("first", "first_module", SOURCE, one="first_module:P")
    with pytest.raises(PluginError, match="there is no 'two'; installed: one"):
        Registry(GROUP).get("two")
    with pytest.raises(PluginError, match="installed: none"):
        Registry("torchwcache.empty").get("two")


def test_two_of_one_name_is_an_error_that_names_both(install) -> None:
    install("first", "first_module", SOURCE, one="first_module:P")
    install("second", "second_module", SOURCE, one="second_module:P", two="second_module:P")
    with pytest.raises(PluginError, match=r"one") as caught:
        Registry(GROUP).get("one")
    for part in ("first 1.0", "'first_module:P'", "second 1.0", "'second_module:P'"):
        assert part in str(caught.value)
    assert "first_module" not in sys.modules


def test_one_distribution_seen_twice_is_no_clash(install, monkeypatch: pytest.MonkeyPatch) -> None:
    site = install("first", "first_module", SOURCE, one="first_module:P")
    monkeypatch.syspath_prepend(str(site) + "/.")
    assert Registry(GROUP).get("one")


def test_registering_by_hand(install) -> None:
    install("first", "first_module", SOURCE, one="first_module:P")
    registry: Registry[object] = Registry(GROUP)
    mine = object()
    registry.register("mine", mine)
    registry.register("mine", mine)
    assert registry.get("mine") is mine
    with pytest.raises(PluginError, match=r"registered as .* already"):
        registry.register("mine", object())
    with pytest.raises(PluginError, match=r"provided by 'first_module:P' of first 1\.0"):
        registry.register("one", mine)
    registry.unregister("mine")
    assert registry.names() == ("one",)


@pytest.mark.parametrize(
    "source", ["raise RuntimeError('boom')", "import no_such_module_at_all", "", "class P:\n    def __init__(self): 1 / 0"]
)
def test_a_plugin_that_cannot_be_loaded_says_whose_it_is(install, source: str) -> None:
    install("first", "first_module", source, one="first_module:P")
    with pytest.raises(PluginError, match=r"first 1\.0.*cannot be loaded") as caught:
        Registry(GROUP).get("one")
    assert caught.value.__cause__ is not None


def test_a_plugin_must_be_what_it_is_installed_as(install) -> None:
    install("first", "first_module", SOURCE, other="first_module:P")
    with pytest.raises(PluginError, match="installed as 'other', but calls itself 'one'"):
        Registry(GROUP).get("other")


def test_our_own_are_installed() -> None:
    script = (
        "from torchwcache.plugins import ADAPTERS\nfrom torchwcache.loaders.registry import LOADERS\n"
        "from torchwcache.quantization.registry import METHODS\nimport sys\n"
        "print(ADAPTERS.names(), LOADERS.names(), METHODS.names(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["('nn',)", "('huggingface',", "'safetensors')", "('fp8',", "'unquantized')", "False"]
