"""The model loader that ``--load-format torchwcache`` names."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from torchwcache.config import Mode, ModelConfig, Role
from torchwcache.engine import EngineOptions, RankStart
from torchwcache.engine_memory import OwnMemory, make_free, wanted_nbytes
from torchwcache.errors import RefusedError
from torchwcache.memory.select import memory_for
from torchwcache.production import free_up
from torchwcache_vllm.adapter import Stage, VLLMAdapter
from torchwcache_vllm.guards import LOAD_FORMAT, guard, refusal_of, refuse_write, unknown_device
from torchwcache_vllm.memory import (
    charge_later,
    counted_before_the_load,
    counted_by_vllm,
    external_nbytes,
    not_counted_nbytes,
)
from torchwcache_vllm.ranks import parallelism, ranks_of, shared_anywhere
from torchwcache_vllm.versions import OLDEST, parse, seam_problems, version_note

__all__ = ["LOAD_FORMAT", "TorchwcacheModelLoader"]

logger = init_logger("vllm.torchwcache")

_starts: dict[tuple[int, str], RankStart] = {}
"""What was decided before memory was counted, until the loader is asked for the model: vLLM makes a loader for each occasion."""


class TorchwcacheModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Attach a finished model, or let vLLM's default loader load it and publish what came out.

    Options are keys of ``--model-loader-extra-config``, beside those of vLLM's default loader; see ``EngineOptions``. The mode is
    ``daemon`` unless something else is asked for: this load format *is* the asking.
    """

    evicted_nbytes = 0
    """By how many bytes more are free on this engine's device, since entries that nobody used were evicted for it."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra = load_config.model_loader_extra_config
        self.options, rest = EngineOptions.split(extra if isinstance(extra, dict) else {}, default_mode=Mode.DAEMON)
        self.plain_config = dataclasses.replace(load_config, load_format="auto", model_loader_extra_config=rest)
        DefaultModelLoader(self.plain_config)  # a key that neither of us knows is an error now, not at the first miss

    def download_model(self, model_config: Any) -> None:
        """As vLLM's default loader."""
        DefaultModelLoader(self.plain_config).download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """As vLLM's default loader, unless the weights of this process lie in memory that others map.

        Raises:
            RefusedError: They do.
        """
        refuse_write("loading weights into a running model")
        DefaultModelLoader(self.plain_config).load_weights(model, model_config)

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Any:
        """As vLLM's default loader, likewise; vLLM reloads in place through this.

        Raises:
            RefusedError: They do.
        """
        refuse_write("reloading weights in place")
        return DefaultModelLoader(self.plain_config).get_all_weights(model_config, model)

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Decide hit or miss under a lease, before vLLM counts memory; what is mapped is charged as if this engine had loaded it.

        vLLM calls this since 0.32, on GPUs; before, see ``torchwcache_vllm.memory``.
        """
        _give_up_starts()
        start = self._start(vllm_config, vllm_config.model_config, "")
        external = 0 if start is None else self._decide(start)
        evict: Callable[[int, Callable[[], int]], int]
        if start is not None:
            evict, device, needed = start.free_up, start.cfg.device, 0 if external else start.needed_nbytes()
        elif self.options.mode is not Mode.OFF and not unknown_device(vllm_config):
            memory = memory_for("cuda")
            evict, device, needed = functools.partial(free_up, self.options.socket, memory), str(memory.device), 0
        else:
            return 0
        wanted = wanted_nbytes(device, vllm_config.cache_config.gpu_memory_utilization, mapped=external, needed=needed)
        self.evicted_nbytes = make_free(evict, device, wanted)
        return external

    @staticmethod
    def _decide(start: RankStart) -> int:
        """Bytes that vLLM is to count for what is mapped; 0 when it is going to be loaded."""
        own = OwnMemory(start.cfg.device)
        start.adapter.put_off = True  # type: ignore[attr-defined]
        if not start.decide():
            start.adapter.put_off = False  # type: ignore[attr-defined]
            return 0
        assert start.attachment is not None
        return external_nbytes(start.attachment, counted_before_the_load(own))

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """Attach or load; all ranks do the same."""
        start = self._start(vllm_config, model_config, prefix)
        if start is None:
            loader = DefaultModelLoader(self.plain_config)
            model: nn.Module = loader.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            return model
        _starts.pop((id(model_config), prefix), None)
        charged_before = start.cfg.device == "cpu" or start.adapter.put_off  # type: ignore[attr-defined]
        own = None if charged_before else OwnMemory(start.cfg.device)
        evicted = start.evicted_nbytes  # before vLLM counted
        attachment = start.finish()
        # Memory has been charged for a hit by now: what fails here stops the start, instead of loading beside what is mapped.
        start.adapter.process(start.cfg, attachment.model)  # type: ignore[attr-defined]
        guard(attachment.model, shared=shared_anywhere(start.shared, self.options.timeout_s))
        if own is not None:
            not_counted = not_counted_nbytes(attachment, own.nbytes(counted_by_vllm()))
            charge_later(not_counted, vllm_config, evicted=start.evicted_nbytes - evicted)
        return attachment.model.eval()

    def _start(self, vllm_config: Any, model_config: Any, prefix: str) -> RankStart | None:
        known = _starts.get((id(model_config), prefix))
        if known is not None:
            return known
        if self.options.mode is Mode.OFF:
            return None
        refusal = refusal_of(vllm_config, self.load_config) or _version_refusal()
        if refusal:
            if self.options.policies.on_refused.value == "error":
                raise RefusedError(refusal, reason=refusal, kind="configuration")
            logger.warning("torchwcache: %s; loading without the cache", refusal)
            return None
        cfg = ModelConfig(
            model_config.model,
            dtype=model_config.dtype,
            device=_device(vllm_config),
            adapter="vllm",
            role=_role(vllm_config, model_config, prefix),
            parallel=parallelism(vllm_config),
            identity=self.options.identity,
            revision=model_config.revision,
            trust_remote_code=bool(model_config.trust_remote_code),
            ignore=self.options.ignore,
            constants=self.options.constants,
        )
        adapter = VLLMAdapter(vllm_config, model_config, self.plain_config, prefix=prefix, stage=_stage(cfg.device))
        group = ranks_of(self.options.timeout_s, draft=cfg.role is Role.DRAFT)
        start = RankStart(cfg, adapter, self.options, group, say=logger.info)
        _starts[id(model_config), prefix] = start
        return start


def _give_up_starts() -> None:
    """Give back what was decided for engines of this process that never came to load: one whose start vLLM ended in between.

    A leave to produce would be kept alive for good, and this process's next engine would wait for it.
    """
    while _starts:
        _starts.popitem()[1].close()


@functools.cache
def _version_refusal() -> str:
    import vllm

    note, problems = version_note(vllm.__version__), seam_problems()
    if problems:
        return f"vLLM {vllm.__version__} has changed where torchwcache plugs in ({'; '.join(problems)}); nothing is published"
    if parse(vllm.__version__) < OLDEST:
        return note
    if note:
        logger.warning("torchwcache: %s", note)
    return ""


def _stage(device: str) -> Stage:
    """On the CPU vLLM's kernels keep packed copies of the weights to themselves, so what is shared is what they are packed from."""
    return "finished" if device != "cpu" or os.environ.get("TORCHWCACHE_VLLM_STAGE") == "finished" else "loaded"


def _role(vllm_config: Any, model_config: Any, prefix: str) -> Role:
    speculative = vllm_config.speculative_config
    if speculative is None:
        return Role.TARGET
    return Role.DRAFT if model_config is speculative.draft_model_config or prefix.startswith("draft") else Role.TARGET


def _device(vllm_config: Any) -> str:
    device = torch.device(vllm_config.device_config.device)
    if device.type == "cuda" and device.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return str(device)
