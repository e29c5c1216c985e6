"""The ranks of a vLLM engine, and which shard of the model each of them holds."""

from __future__ import annotations

from typing import Any

from torchwcache.config import Parallelism
from torchwcache.engine import GridRanks, OneRank, ProcessGroupRanks, RankGroup

__all__ = ["parallelism", "ranks_of", "shared_anywhere"]

_SLOWEST_RANK_S = 3600.0
"""How long a rank may take longer than another: reading a checkpoint from a slow disk, for instance."""


def ranks_of(timeout_s: float, *, draft: bool) -> RankGroup:
    """All ranks that load one model together. Data-parallel replicas start for themselves.

    Args:
        timeout_s: How long a rank may wait for another engine that produces its shard, in seconds.
        draft: A draft model is loaded by the last pipeline stage alone: the other stages would never come to agree on it.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    bound = timeout_s + _SLOWEST_RANK_S
    rows = [group for group in (get_tp_group(), *(() if draft else (get_pp_group(),))) if group.world_size > 1]
    if not rows:
        return OneRank()
    ranks = [ProcessGroupRanks(group.cpu_group, timeout_s=bound) for group in rows]
    return ranks[0] if len(ranks) == 1 else GridRanks(*ranks)


def shared_anywhere(shared: bool, timeout_s: float) -> bool:
    """Whether weights are shared in this replica or in another that serves parts of the same experts; all replicas must ask.

    Args:
        shared: Whether they are in this one.
        timeout_s: As in :func:`ranks_of`.
    """
    from vllm.distributed.parallel_state import get_dp_group

    group = get_dp_group()
    if group.world_size == 1:
        return shared
    replicas = ProcessGroupRanks(group.cpu_group, timeout_s=timeout_s + _SLOWEST_RANK_S)
    return "shared" in replicas.exchange("shared" if shared else "private", "what is shared")


def parallelism(vllm_config: Any) -> Parallelism:
    """Sizes and ranks.

    Experts run over the tensor and the data-parallel ranks together: whole ones with expert parallelism, slices of each without.
    vLLM makes a data-parallel group of more than one rank for mixture-of-experts only; replicas of other models know of no others.
    """
    from vllm.distributed.parallel_state import get_dp_group, get_ep_group, get_pp_group, get_tp_group

    tp, pp, dp = get_tp_group(), get_pp_group(), get_dp_group()
    parallel = vllm_config.parallel_config
    ep_size, ep_rank = 1, 0
    if parallel.enable_expert_parallel:
        ep = get_ep_group()
        ep_size, ep_rank = ep.world_size, ep.rank_in_group
    return Parallelism(
        tp_size=tp.world_size,
        tp_rank=tp.rank_in_group,
        pp_size=pp.world_size,
        pp_rank=pp.rank_in_group,
        dp_size=dp.world_size,
        dp_rank=dp.rank_in_group,
        ep_size=ep_size,
        ep_rank=ep_rank,
        dp_matters=ep_size > 1 or dp.world_size > 1,
    )
