"""vmap: the mapped axis is folded into the batch. Calls that cannot be folded run once per sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .library import ARGUMENTS, OPERATORS, flattened

Dims = Sequence[int | None]
OF_SCORES = ("attn_mask", "attn_bias")
PER_SEQUENCE = ("kv_lens", "kv_starts", "q_lens")
BATCHED = ("grad_out", "grad_lse", "query", "key", "value", "out", "lse", "lse_error", *OF_SCORES, *PER_SEQUENCE)
"""Arguments whose first axis is the batch."""


def attention(info: Any, in_dims: Dims, *args: Any) -> Any:
    """The operator attention over one more axis: (outputs, the axis in each)."""
    return _fold("attention", info.batch_size, in_dims, args)


def attention_backward(info: Any, in_dims: Dims, *args: Any) -> Any:
    """The operator attention_backward, likewise."""
    return _fold("attention_backward", info.batch_size, in_dims, args)


def _fold(name: str, n: int, in_dims: Dims, args: tuple[Any, ...]) -> Any:
    values = dict(zip(ARGUMENTS[name], args, strict=True))
    dims = dict(zip(ARGUMENTS[name], in_dims, strict=True))
    packed = any(values.get(x) is not None for x in ("cu_seqlens_q", "cu_seqlens_k", "block_table"))
    slopes, batched = values["alibi_slopes"], set(BATCHED)
    if slopes is not None and _sample(slopes, dims["alibi_slopes"]).dim() == 2:
        batched.add("alibi_slopes")
    per_sample = any(dims[x] is not None for x in dims if x not in batched)
    drops = values["dropout_p"] != 0  # which weights are dropped depends on the index in the batch
    batch = _sample(values["query"], dims["query"]).size(0)
    given = [x for x in OF_SCORES if values[x] is not None]
    broadcast = [x for x in given if _sample(values[x], dims[x]).size(0) == 1 != batch]
    # These gradients are sums over the batch.
    summed = "bias_grad" in values and (
        values["sinks"] is not None or (values["bias_grad"] and "attn_bias" in broadcast)
    )
    if packed or per_sample or drops or summed:
        return _run_per_sample(OPERATORS[name], n, in_dims, args)
    folded = {x: _folded(value, dims[x], n) if x in batched else value for x, value in values.items()}
    for argument in broadcast:
        x, dim = values[argument], dims[argument]
        folded[argument] = x if dim is None else x.movedim(dim, 0).repeat_interleave(batch, 1).flatten(0, 1)
    return _unfolded(OPERATORS[name](*folded.values()), 0, n)


def _sample(x: Tensor, dim: int | None) -> Tensor:
    return x if dim is None else x.select(dim, 0)


def merge(info: Any, in_dims: Dims, *states: Any) -> Any:
    """The operator merge, with its two lists flattened."""
    n = len(states) // 2
    folded = [_folded(x, dim, info.batch_size) for x, dim in zip(states, in_dims, strict=True)]
    return _unfolded(OPERATORS["merge"](folded[:n], folded[n:]), 0, info.batch_size)


def merge_backward(info: Any, in_dims: Dims, *args: Any) -> Any:
    """The operator merge_backward, likewise."""
    n = len(args) // 2 - 1
    grad_out, grad_lse, *states = (_folded(x, dim, info.batch_size) for x, dim in zip(args, in_dims, strict=True))
    results = OPERATORS["merge_backward"](grad_out, grad_lse, states[:n], states[n:])
    return _unfolded(results, 1, info.batch_size)


def _folded(x: Tensor | None, dim: int | None, n: int) -> Tensor | None:
    """[n * batch, ...]"""
    if x is None:
        return None
    return (x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _unfolded(results: tuple[Tensor, ...], dim: int, n: int) -> Any:
    """An empty result stands for a gradient that was not asked for."""
    unfolded = tuple(x.expand(n, 0) if x.dim() == 1 else x.unflatten(dim, (n, -1)) for x in results)
    return unfolded, tuple(0 if x.dim() == 2 and x.numel() == 0 else dim for x in unfolded)


def _run_per_sample(op: Callable[..., Any], n: int, in_dims: Dims, args: tuple[Any, ...]) -> Any:
    def call(i: int) -> Any:
        return op(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)))

    results = zip(*(call(i) for i in range(n)), strict=True)
    stacked = tuple(torch.stack(x) for x in results)
    return stacked, (0,) * len(stacked)


def _flat(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a rule that takes flattened lists of tensors, for vmap of the operator itself."""

    def wrapper(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        lists = zip(args, in_dims, strict=True)
        dims = [[None] * len(x) if isinstance(x, (list, tuple)) and dim is None else dim for x, dim in lists]
        return rule(info, flattened(dims), *flattened(args))

    return wrapper


for _rule in (attention, attention_backward, merge, merge_backward):
    torch.library.register_vmap(f"flashsoftmax::{_rule.__name__}", _flat(_rule))
