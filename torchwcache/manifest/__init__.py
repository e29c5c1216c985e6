"""The manifest: the immutable, typed description of one finished module state, and its validation. Imports no torch.

Tables refer to each other by number. Everything is checked by :func:`validate` against the real sizes of the segments before a
single tensor is made from it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from torchwcache.errors import ManifestError
from torchwcache.manifest.checks import ITEMSIZE, validate
from torchwcache.manifest.columns import Column, pack_column, unpack_column
from torchwcache.manifest.tables import (
    Attributes,
    ModuleKind,
    Modules,
    ModuleSpec,
    Storages,
    StorageSpec,
    TensorKind,
    Tensors,
    TensorSpec,
    pack_modules,
    pack_storages,
    pack_tensors,
)
from torchwcache.manifest.values import ClassEdit, Edit, ObjectSpec, Spec, Step

__all__ = [
    "ITEMSIZE",
    "MANIFEST_VERSION",
    "Attributes",
    "ClassEdit",
    "Column",
    "Edit",
    "Manifest",
    "ModuleKind",
    "ModuleSpec",
    "Modules",
    "ObjectSpec",
    "Step",
    "StorageSpec",
    "Storages",
    "TensorKind",
    "TensorSpec",
    "Tensors",
    "decode_manifest",
    "encode_manifest",
    "pack_modules",
    "pack_storages",
    "pack_tensors",
    "validate",
]

MANIFEST_VERSION = 3
"""Version of the layout described here; part of every fingerprint."""


class Manifest(Spec, frozen=True):
    """One module state. See the field types for what each table holds.

    ``addresses`` says where the producer had each segment mapped, where clients can ask for the same place (memory ``cuda``); it is
    empty where that means nothing. It is a wish, never a promise. ``attribute_sets`` are those that ``objects`` refer to.
    """

    version: int
    fingerprint: str
    device: str
    memory: str
    construction: Literal["meta", "parameters-meta"]
    segments: tuple[int, ...]
    addresses: tuple[int, ...]
    storages: Storages
    tensors: Tensors
    modules: Modules
    attribute_sets: tuple[Attributes, ...]
    objects: tuple[ObjectSpec, ...]
    edits: tuple[Edit, ...]
    class_edits: tuple[ClassEdit, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(self.segments)


_encoder = msgspec.msgpack.Encoder(enc_hook=pack_column)
_decoder = msgspec.msgpack.Decoder(Manifest, ext_hook=unpack_column)


def encode_manifest(manifest: Manifest) -> bytes:
    """Serialise a manifest to msgpack."""
    return _encoder.encode(manifest)


def decode_manifest(data: bytes | memoryview) -> Manifest:
    """Read a manifest; types are checked, bounds are not (see :func:`validate`). It goes on using ``data``, which must not change.

    Raises:
        ManifestError: Malformed bytes, wrong types, unknown fields, or another manifest version.
    """
    try:
        manifest = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ManifestError(f"malformed manifest: {error}", path="$") from error
    if manifest.version != MANIFEST_VERSION:
        raise ManifestError(f"manifest version {manifest.version}, this is {MANIFEST_VERSION}", path="$.version")
    return manifest
