"""DTensor: calls that are split by batch or by heads need no communication; others are gathered first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .library import ARGUMENTS, OPERATORS, flattened
from .options import PER_HEAD

LENGTHS = ("kv_lens", "kv_starts", "q_lens", "cu_seqlens_q", "cu_seqlens_k", "block_table")
RESULTS = {
    "attention": ("out", "lse", "lse_error"),
    "attention_backward": ("query", "key", "value", "attn_bias", "sinks"),
}

_is_registered = False


def register() -> None:
    """Registers the operators with DTensor if the program has imported it. Importing it here would take a second."""
    global _is_registered
    if _is_registered or torch.compiler.is_compiling() or "torch.distributed.tensor" not in sys.modules:
        return
    _is_registered = True
    from torch.distributed.tensor.experimental import register_sharding

    for name in ("attention", "attention_backward"):
        register_sharding(OPERATORS[name])(_attention(name))
    register_sharding(OPERATORS["merge"])(_merge(states=0))
    register_sharding(OPERATORS["merge_backward"])(_merge(states=1))


def replicated(x: Tensor, like: Tensor) -> Tensor:
    """x or, if `like` is a DTensor, the x of the first rank on all ranks."""
    if not hasattr(like, "device_mesh"):
        return x
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(x, like.device_mesh, [Replicate()] * like.device_mesh.ndim)


def _attention(name: str) -> Callable[..., Any]:
    """The placements of (results, arguments) that need no communication."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    def whole(argument: str, shape: Any) -> Any:
        return Replicate()

    def by_batch(argument: str, shape: Any) -> Any:
        per_head = argument in PER_HEAD and (shape is None or len(shape) == 1)
        return Replicate() if per_head or _is_broadcast(argument, shape, 0) else Shard(0)

    def by_heads(argument: str, shape: Any) -> Any:
        if argument in PER_HEAD:
            return Shard(0 if shape is None else len(shape) - 1)
        return Replicate() if argument in LENGTHS or _is_broadcast(argument, shape, 1) else Shard(1)

    def strategies(*args: Any) -> Any:
        values = dict(zip(ARGUMENTS[name], args, strict=True))
        shapes = {x: value.shape for x, value in values.items() if hasattr(value, "placements")}
        rules = [whole]
        drops = values["dropout_p"] != 0  # which weights are dropped depends on the indices of batch and head
        if not drops and values["cu_seqlens_q"] is None and values.get("block_table") is None:
            rules.append(by_batch)
        ranks = values["query"].mesh.size()
        if not drops and values["key"].shape[1] % ranks == 0:  # then query heads go with their key heads
            rules.append(by_heads)
        found = []
        for place in rules:
            inputs = [place(x, shapes[x]) if x in shapes else None for x in values]
            results = [place(x, shapes.get(x)) for x in RESULTS[name]]
            if name == "attention_backward" and place is not whole:
                for n, x in enumerate(RESULTS[name]):  # a gradient of what all ranks have is a sum over them
                    results[n] = Partial() if x in shapes and results[n] == Replicate() else results[n]
            found.append((results, inputs))
        return found

    return strategies


def _merge(states: int) -> Callable[..., Any]:
    """states: the axes of states in the results."""
    from torch.distributed.tensor import Replicate, Shard

    def strategies(*args: Any) -> Any:
        axes = [None, 0, 1]  # whole, by batch, by heads
        return [
            (
                [Replicate() if d is None else Shard(d + states)] * 2,
                [None if x is None else Replicate() if d is None else Shard(d) for x in flattened(args)],
            )
            for d in axes
        ]

    return strategies


def _is_broadcast(argument: str, shape: Any, axis: int) -> bool:
    return argument in ("attn_mask", "attn_bias") and shape is not None and shape[axis] == 1


register()
