"""Conformance suites for third-party adapters, loaders and quantization methods.

Subclass one in your own tests, give it the fixtures it names, and pytest runs what torchwcache expects of every plugin:

    class TestMyLoader(LoaderConformance):
        @pytest.fixture
        def loader(self): return MyLoader()

        @pytest.fixture
        def cfg(self, tmp_path): return ModelConfig(write_checkpoint(tmp_path), build=MyModule)

Needs pytest, which torchwcache itself does not depend on.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from torchwcache.adapter import Adapter, LoadContext
from torchwcache.config import Access, ModelConfig
from torchwcache.errors import CheckpointError, CheckpointNotFoundError, UnsupportedQuantizationError
from torchwcache.identity.fingerprint import Fingerprint
from torchwcache.manifest import decode_manifest, encode_manifest, validate
from torchwcache.memory.base import Memory
from torchwcache.memory.select import memory_for
from torchwcache.module.capture import capture
from torchwcache.module.one_at_a_time import one_at_a_time
from torchwcache.module.pack import SegmentWriter, pack
from torchwcache.module.parity import compare_modules
from torchwcache.module.reachability import find_meta_tensors
from torchwcache.module.rebind import rebind

if TYPE_CHECKING:
    from torchwcache.loaders.base import Loader
    from torchwcache.quantization.base import QuantizationMethod

__all__ = ["AdapterConformance", "LoaderConformance", "QuantizationConformance", "opened_files"]


_listeners: list[list[str]] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _listeners and isinstance(args[0], (str, bytes)):
        path = args[0].decode(errors="replace") if isinstance(args[0], bytes) else args[0]
        for heard in _listeners:
            heard.append(path)


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Paths that Python opened meanwhile (an audit hook, which cannot be removed and so is installed once)."""
    if not getattr(opened_files, "installed", False):
        sys.addaudithook(_audit)
        opened_files.installed = True  # type: ignore[attr-defined]
    heard: list[str] = []
    _listeners.append(heard)
    try:
        yield heard
    finally:
        _listeners.remove(heard)


def _context(memory: Memory, writer: SegmentWriter) -> LoadContext:
    return LoadContext(
        allocate=writer.allocate, expect=writer.expect, read_file=memory.read_file, progress=lambda done, total: None
    )


class AdapterConformance:
    """What every adapter must do. Fixtures to give: ``adapter`` and ``cfg``, a config that the adapter can load."""

    @pytest.fixture
    def memory(self, cfg: ModelConfig) -> Memory:
        """Where the weights go."""
        return memory_for(cfg.device)

    def test_it_has_a_name_and_a_version(self, adapter: Adapter) -> None:
        """Both enter every fingerprint."""
        assert isinstance(adapter.name, str)
        assert adapter.name
        assert isinstance(adapter.version, str)
        assert adapter.version
        assert type(adapter.accepts(ModelConfig("x"))) is bool

    def test_building_is_repeatable_and_makes_no_weights(self, adapter: Adapter, cfg: ModelConfig) -> None:
        """Clients start from what the producer compared with."""
        with one_at_a_time():
            (one, how), (two, again) = adapter.build(cfg), adapter.build(cfg)
            with adapter.scratch_build(cfg) as (three, _):
                pass
        assert how == again
        assert how in ("meta", "parameters-meta")
        for module in (one, two, three):
            assert all(parameter.is_meta for parameter in module.parameters())
            assert compare_modules(one, module, rules=adapter.rules(cfg, module)).equal

    def test_a_description_reads_no_weights_and_has_a_canonical_form(self, adapter: Adapter, cfg: ModelConfig) -> None:
        """A hit must not read the files that it saves reading."""
        module, _ = adapter.build(cfg)
        with opened_files() as opened:
            description = adapter.describe(cfg, module)
        assert not [path for path in opened if path.endswith((".safetensors", ".bin", ".pt", ".gguf"))]
        assert description.checkpoint.files
        assert description.source
        fingerprint = Fingerprint.from_fields(dict(description.fields))
        assert fingerprint == Fingerprint.from_fields(dict(adapter.describe(cfg, adapter.build(cfg)[0]).fields))

    def test_what_is_attached_is_what_was_loaded(self, adapter: Adapter, cfg: ModelConfig, memory: Memory) -> None:
        """Load, capture, pack, seal, map, rebind: equal bit for bit, and complete."""
        with one_at_a_time(), SegmentWriter(memory) as writer:
            built, how = adapter.build(cfg)
            result = adapter.load(cfg, _context(memory, writer))
            assert not find_meta_tensors(result.module)
            rules = adapter.rules(cfg, result.module)
            rules = dataclasses.replace(rules, ignore={**rules.ignore, **cfg.ignore}, constants=(*rules.constants, *cfg.constants))
            captured = capture(result.module, built, device=memory.device, rules=rules, construction=how)  # type: ignore[arg-type]
            placements = pack(captured, writer)
            fds = [segment.seal() for segment in writer.segments]
            sizes = [segment.nbytes for segment in writer.segments]
            data = encode_manifest(
                captured.manifest(placements, sizes, fingerprint="0" * 32, device_id=memory.device_id, memory=memory.kind)
            )
            manifest = decode_manifest(data)
            validate(manifest, [memory.size_of(fd, stated) for fd, stated in zip(fds, sizes, strict=True)])
            segments = memory.map_all(fds, sizes, access=Access.COPY_ON_WRITE)
        rebind(built, manifest, segments, device=memory.device)
        for segment in segments:
            segment.settle()
        for module in (result.module, built):
            adapter.prepare(cfg, module)
            adapter.prepare(cfg, module)  # twice is once
        report = compare_modules(result.module, built, rules=rules)
        assert report.equal, "\n".join(str(difference) for difference in report.differences)


class LoaderConformance:
    """What every loader must do. Fixtures to give: ``loader`` and ``cfg``, a config whose files the test may damage."""

    def load(self, loader: Loader, cfg: ModelConfig) -> nn.Module:
        """Load into segments, as a producer does."""
        memory = memory_for(cfg.device)
        with one_at_a_time(), SegmentWriter(memory) as writer:
            return loader.load(cfg, _context(memory, writer)).module

    def test_it_has_a_name_and_a_version(self, loader: Loader) -> None:
        """Both enter every fingerprint."""
        assert isinstance(loader.name, str)
        assert loader.name
        assert isinstance(loader.version, str)
        assert loader.version

    def test_it_opens_no_file_that_it_does_not_name(self, loader: Loader, cfg: ModelConfig) -> None:
        """What is not named is not hashed, and a change of it would not be seen."""
        files = loader.files(cfg)
        named = {Path(path).resolve() for path in files.paths}
        folder = files.root.resolve() if files.root is not None else files.paths[0].resolve().parent
        with opened_files() as opened:
            self.load(loader, cfg)
        strangers = {Path(path).resolve() for path in opened if Path(path).resolve().is_relative_to(folder)} - named
        weights = {path for path in strangers if path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py")}
        assert not weights

    def test_a_load_is_a_function_of_the_files(self, loader: Loader, cfg: ModelConfig) -> None:
        """Twice the same, whatever the random state."""
        torch.manual_seed(1)
        one = self.load(loader, cfg)
        torch.manual_seed(2)
        two = self.load(loader, cfg)
        assert not find_meta_tensors(one)
        report = compare_modules(one, two)
        assert report.equal, "\n".join(str(difference) for difference in report.differences)

    def test_a_truncated_file_is_an_error_and_no_crash(self, loader: Loader, cfg: ModelConfig) -> None:
        """With an error that names the file."""
        largest = max(loader.files(cfg).paths, key=lambda path: path.stat().st_size)
        data = largest.read_bytes()
        largest.unlink()
        largest.write_bytes(data[: len(data) // 2])
        with pytest.raises(CheckpointError, match=largest.name):
            self.load(loader, cfg)

    def test_a_missing_file_is_an_error(self, loader: Loader, cfg: ModelConfig) -> None:
        """Before anything is loaded."""
        for path in loader.files(cfg).paths:
            path.unlink()
        with pytest.raises(CheckpointNotFoundError):
            loader.files(cfg)


class QuantizationConformance:
    """What every quantization method must do.

    Fixtures to give: ``method``; ``stated``, a ``quantization_config`` that is the method's own; ``sound``, a module that it
    accepts; ``unsound``, modules that it must refuse (scales missing, transposed, of another dtype, ...).
    """

    foreign: tuple[dict[str, Any], ...] = (
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "no such method"},
    )
    """Configs of other methods."""

    def test_it_accepts_its_own_config_and_no_other(self, method: QuantizationMethod, stated: dict[str, Any] | None) -> None:
        """A method that accepts everything would open the gate."""
        assert method.accepts(stated)
        for config in self.foreign:
            if config != stated:
                assert not method.accepts(config)

    def test_it_names_its_evidence(self, method: QuantizationMethod) -> None:
        """The parity run that shows that what it caches is what was loaded."""
        assert isinstance(method.name, str)
        assert method.name
        assert isinstance(method.evidence, str)
        assert method.evidence

    def test_it_accepts_sound_tensors(self, method: QuantizationMethod, sound: nn.Module) -> None:
        """The real tensors, not only the config."""
        method.check_tensors(sound)

    def test_it_refuses_unsound_tensors(self, method: QuantizationMethod, unsound: list[nn.Module]) -> None:
        """By name."""
        for module in unsound:
            with pytest.raises(UnsupportedQuantizationError):
                method.check_tensors(module)
