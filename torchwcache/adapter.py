"""What an adapter is: the one piece that knows how an engine builds a module on the meta device and loads it for real."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torchwcache.config import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchwcache.identity.checkpoint import CheckpointFiles

__all__ = ["Adapter", "CaptureRules", "Description", "LoadContext", "LoadResult", "Versioned"]


class Versioned(Protocol):
    """Something with a name and a version that enter the fingerprint."""

    @property
    def name(self) -> str:
        """The registered name."""

    @property
    def version(self) -> str:
        """Changes whenever the same input may give another result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRules:
    """What an adapter (or the user) declares about a module's state. Patterns are ``fnmatch`` patterns of paths."""

    ignore: Mapping[str, str] = field(default_factory=dict)
    """Python-side attributes that need not be carried: pattern to reason."""
    constants: tuple[str, ...] = ()
    """Buffers and plain tensors that nothing writes after loading: shared instead of copied per client."""
    process: Mapping[str, str] = field(default_factory=dict)
    """Classes (``"module:qualname"``, subclasses too) of objects that are the process's, not the model's, such as process groups;
    class to reason. Where build and load refer to the very same object, a client's build refers to its own: nothing in it is looked
    at. Two different ones are compared as always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What is known about a model before anything is loaded.

    Attributes:
        fields: What decides the finished bytes, beyond ``ModelConfig`` itself: class, full config, versions, code digests.
        checkpoint: The files that the loader will open.
        source: Resolved path or repo id: the slot's name.
        quantization_config: As the checkpoint states it, or ``None``.
        label: A short name for people, such as ``"LlamaForCausalLM bfloat16"``.
        loader: What reads the checkpoint.
        packages: Distributions that build or load the module (``transformers``); their versions enter the fingerprint.
        env_names: Environment variables from which the engine resolves options.
        computes: Whether loading runs arithmetic, so that numeric settings of torch count.
    """

    fields: Mapping[str, Any]
    checkpoint: CheckpointFiles
    source: str
    quantization_config: Mapping[str, Any] | None
    label: str
    loader: Versioned
    packages: tuple[str, ...] = ()
    env_names: tuple[str, ...] = ()
    computes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadContext:
    """What a load may use.

    Attributes:
        allocate: Gives a zeroed one-dimensional uint8 tensor of so many bytes in segment memory: what is loaded there needs no
            copy when it is published.
        expect: Told beforehand the sizes of what will be allocated, so that few segments of the right size are made.
        read_file: ``Memory.read_file``: fills a contiguous tensor, on the device of what ``allocate`` gives, from a file descriptor
            at an offset. Any thread may call it. What is read by it is hashed on the way; what is not is read a second time.
        progress: Called with bytes done and bytes in all.
        publishes: Whether what is loaded is going to be published. Where it is not, an adapter of an engine loads as that would
            without it, and need not find out what was left unwritten.
    """

    allocate: Callable[[int], torch.Tensor]
    expect: Callable[[Iterable[int]], None]
    read_file: Callable[[int, int, torch.Tensor], None]
    progress: Callable[[int, int], None]
    publishes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """A finished module, and what its load had to make up.

    Attributes:
        module: The module, ready to run.
        initialized: Names of tensors that the checkpoint does not hold and that were initialized anew (not a function of the
            checkpoint, unless seeded).
        unwritten: Names of tensors that the checkpoint does not hold and nobody gave a value, in whole or in part. What is in them
            is in no other process: never published, seed or not.
        notes: What a user should know, such as a full build where the meta build did not suffice.
    """

    module: nn.Module
    initialized: Sequence[str] = ()
    unwritten: Sequence[str] = ()
    notes: Sequence[str] = ()


class Adapter(Protocol):
    """One engine's way to build and load modules. Found through the entry-point group ``torchwcache.adapters``."""

    name: str
    version: str

    def accepts(self, cfg: ModelConfig) -> bool:
        """Whether this adapter is the one for a config that names none."""

    def describe(self, cfg: ModelConfig, module: nn.Module) -> Description:
        """Describe the model, given the module as built on meta. Reads configs, never weights."""

    def build(self, cfg: ModelConfig) -> tuple[nn.Module, str]:
        """Build the module on the meta device; also returns how: ``"meta"``, or ``"parameters-meta"`` when only that worked.

        Raises:
            BuildError: The module's ``__init__`` cannot run there.
        """

    def scratch_build(self, cfg: ModelConfig) -> AbstractContextManager[tuple[nn.Module, str]]:
        """Build once more in a process that has a live module, leaving the engine's registries as they were."""

    def load(self, cfg: ModelConfig, context: LoadContext) -> LoadResult:
        """Load for real, by the engine's own full pipeline."""

    def rules(self, cfg: ModelConfig, module: nn.Module) -> CaptureRules:
        """What may be ignored and what may be shared."""

    def prepare(self, cfg: ModelConfig, module: nn.Module) -> None:
        """After a rebind: read what every client reads for itself (generation config), set the mode."""
