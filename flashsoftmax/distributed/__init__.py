"""Attention over a sequence, or a cache, that is split over the ranks of a process group."""

from .context import context_attention
from .decode import decode_over_ranks
from .plan import ShardPlan, shard_plan

__all__ = ["ShardPlan", "context_attention", "decode_over_ranks", "shard_plan"]
