"""The operators by argument name, and all that PyTorch has to know of them: shapes, gradients, batches, autocast."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import autocast, autograd, batching, fake, flops, sharding
from .library import ARGUMENTS, OPERATORS

__all__ = ["append_kv", "attention", "autocast", "autograd", "batching", "fake", "flops", "merge", "rotary", "sharding"]


def attention(**arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator attention. Omitted arguments are None, or 0 if None is not allowed."""
    sharding.register()
    values = {"max_seqlen_q": 0, "max_seqlen_k": 0, "dropout_p": 0.0} | arguments
    out, lse, _ = autograd.call(autograd.Attention, *(values.get(name) for name in ARGUMENTS["attention"]))
    return out, lse


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator merge."""
    sharding.register()
    out, lse = autograd.call(autograd.Merge, *outs, *lses)
    return out, lse


def append_kv(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> None:
    """The operator append_kv: writes key and value into the cache."""
    values = {"rotary_interleaved": True} | arguments
    names = ARGUMENTS["append_kv"][4:]
    OPERATORS["append_kv"](key_cache, value_cache, key, value, *(values.get(name) for name in names))


def rotary(query: Tensor, **arguments: Any) -> Tensor:
    """The operator rotary: query with rotary embedding."""
    result: Tensor = OPERATORS["rotary"](query, *(arguments[name] for name in ARGUMENTS["rotary"][1:]))
    return result
