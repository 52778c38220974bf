"""The operators by argument name, and all that PyTorch has to know of them: shapes, gradients, batches, autocast."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import autocast, autograd, batching, fake, flops, sharding
from .dropout import draw_seed
from .library import ARGUMENTS, OPERATORS, listed

__all__ = [
    "append_kv",
    "attention_exact",
    "autocast",
    "autograd",
    "batching",
    "fake",
    "flops",
    "merge",
    "rotary",
    "sharding",
]


def attention_exact(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, lse_error) of the operator attention. lse + lse_error is what lse was before it was rounded.

    Omitted arguments are None, or 0 if None is not allowed.
    """
    sharding.register()
    dropout_p = arguments.get("dropout_p", 0.0)
    drops = not (type(dropout_p) is float and dropout_p == 0)  # a symbolic number may not be 0
    if drops and arguments.get("dropout_seed") is None:
        seed = sharding.replicated(draw_seed(arguments["query"].device), arguments["query"])
        arguments = arguments | {"dropout_seed": seed}
    found: tuple[Tensor, Tensor, Tensor] = autograd.call(autograd.Attention, *listed("attention", arguments))
    return found


def attention_backward(**arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, attn_mask and sinks. Omitted arguments as in attention_exact."""
    found: tuple[Tensor, ...] = autograd.call(autograd.AttentionBackward, *listed("attention_backward", arguments))
    return found


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
