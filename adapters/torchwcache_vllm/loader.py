"""The model loader that ``--load-format torchwcache`` names."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from torchwcache.config import Mode, ModelConfig, Role
from torchwcache.engine import EngineOptions, RankStart
from torchwcache.errors import RefusedError
from torchwcache_vllm.adapter import VLLMAdapter
from torchwcache_vllm.guards import guard_worker, refusal_of
from torchwcache_vllm.ranks import parallelism, ranks_of

__all__ = ["LOAD_FORMAT", "TorchwcacheModelLoader"]

LOAD_FORMAT = "torchwcache"

logger = init_logger("vllm.torchwcache")

_starts: dict[tuple[int, str], RankStart] = {}
"""What was decided before memory was counted, until the loader is asked for the model: vLLM makes a loader for each occasion."""


class TorchwcacheModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Attach a finished model, or let vLLM's default loader load it and publish what came out.

    Options are keys of ``--model-loader-extra-config``, beside those of vLLM's default loader; see ``EngineOptions``. The mode is
    ``daemon`` unless something else is asked for: this load format *is* the asking.
    """

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
        """Refuse: weights of a running engine may lie in memory that others map.

        Raises:
            RefusedError: Always.
        """
        raise RefusedError(
            "weights that come from torchwcache are shared with other processes and are not written to; start the engine with "
            "another --load-format to reload or update weights in place",
            reason="reload",
            kind="guard",
        )

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Decide hit or miss under a lease, before vLLM counts memory: what is mapped is charged as if this engine had loaded it."""
        start = self._start(vllm_config, vllm_config.model_config, "")
        if start is None or not start.decide():
            return 0
        return start.report.mapped_nbytes

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """Attach or load; all ranks do the same."""
        start = self._start(vllm_config, model_config, prefix)
        if start is None:
            return DefaultModelLoader(self.plain_config).load_model(
                vllm_config=vllm_config, model_config=model_config, prefix=prefix
            )
        _starts.pop((id(model_config), prefix), None)
        attachment = start.finish()
        guard_worker(attachment)
        return attachment.model.eval()

    def _start(self, vllm_config: Any, model_config: Any, prefix: str) -> RankStart | None:
        known = _starts.get((id(model_config), prefix))
        if known is not None:
            return known
        if self.options.mode is Mode.OFF:
            return None
        refusal = refusal_of(vllm_config, self.load_config)
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
            role=_role(vllm_config, model_config),
            parallel=parallelism(vllm_config),
            identity=self.options.identity,
            revision=model_config.revision,
            trust_remote_code=bool(model_config.trust_remote_code),
            ignore=self.options.ignore,
            constants=self.options.constants,
        )
        stage = "loaded" if cfg.device == "cpu" else "finished"
        adapter = VLLMAdapter(vllm_config, model_config, self.plain_config, prefix=prefix, stage=stage)  # type: ignore[arg-type]
        start = RankStart(cfg, adapter, self.options, ranks_of(vllm_config, self.options.timeout_s), say=logger.info)
        _starts[id(model_config), prefix] = start
        return start


def _role(vllm_config: Any, model_config: Any) -> Role:
    speculative = vllm_config.speculative_config
    return Role.DRAFT if speculative is not None and model_config is speculative.draft_model_config else Role.TARGET


def _device(vllm_config: Any) -> str:
    device = torch.device(vllm_config.device_config.device)
    if device.type == "cuda" and device.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return str(device)
