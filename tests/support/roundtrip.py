"""Capture, pack, seal, map and rebind in one process: the whole way of a module state, without a daemon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from torchwcache.adapter import CaptureRules
from torchwcache.config import Access
from torchwcache.manifest import Manifest, decode_manifest, encode_manifest, validate
from torchwcache.memory.base import MappedSegment
from torchwcache.memory.host import HostMemory
from torchwcache.module.capture import Captured, capture
from torchwcache.module.classes import ClassSnapshot
from torchwcache.module.construct import init_empty_weights, parameters_on_meta
from torchwcache.module.pack import SegmentWriter, pack
from torchwcache.module.rebind import RebindReport, rebind

CPU = torch.device("cpu")


def mapped_segments() -> int:
    """How many mappings of segments in host memory this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:torchwcache")


def build_meta(build: Callable[[], nn.Module], construction: str = "meta") -> nn.Module:
    context = init_empty_weights(include_buffers=True) if construction == "meta" else parameters_on_meta()
    with torch.random.fork_rng(devices=[]), context:
        return build().eval()


def capture_loaded(
    loaded: nn.Module,
    build: Callable[[], nn.Module],
    rules: CaptureRules | None = None,
    construction: str = "meta",
    classes: ClassSnapshot | None = None,
) -> Captured:
    return capture(
        loaded,
        build_meta(build, construction),
        device=CPU,
        rules=rules,
        construction=construction,
        classes=classes,  # type: ignore[arg-type]
    )


class Publication:
    """A published module state, as a daemon would hold it."""

    def __init__(self, captured: Captured) -> None:
        self.memory = HostMemory()
        self.writer = SegmentWriter(self.memory)
        placements = pack(captured, self.writer)
        self.fds = [segment.seal() for segment in self.writer.segments]
        sizes = [segment.nbytes for segment in self.writer.segments]
        manifest = captured.manifest(placements, sizes, fingerprint="0" * 32, device_id="cpu", memory="memfd")
        self.data = encode_manifest(manifest)

    def manifest(self) -> Manifest:
        manifest = decode_manifest(self.data)
        validate(manifest, [self.memory.size_of(fd) for fd in self.fds])
        return manifest

    def map(self, access: Access = Access.COPY_ON_WRITE) -> list[MappedSegment]:
        return [self.memory.map(fd, n, access=access) for fd, n in zip(self.fds, self.manifest().segments, strict=True)]

    def attach(
        self,
        build: Callable[[], nn.Module],
        *,
        requires_grad: bool = False,
        construction: str = "meta",
        access: Access = Access.COPY_ON_WRITE,
    ) -> tuple[nn.Module, RebindReport]:
        module = build_meta(build, construction)
        report = rebind(module, self.manifest(), self.map(access), device=CPU, requires_grad=requires_grad)
        return module, report


def roundtrip(
    loaded: nn.Module,
    build: Callable[[], nn.Module],
    rules: CaptureRules | None = None,
    *,
    requires_grad: bool = False,
    construction: str = "meta",
) -> nn.Module:
    """Publish ``loaded`` and attach it again; ``loaded`` goes on living on the published bytes."""
    publication = Publication(capture_loaded(loaded, build, rules, construction))
    return publication.attach(build, requires_grad=requires_grad, construction=construction)[0]
