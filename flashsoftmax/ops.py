"""The operators by argument name, and all that PyTorch has to know of them: shapes, gradients, batches, autocast."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import autocast, autograd, batching, fake, flops, sharding
from .library import ARGUMENTS

__all__ = ["attention", "autocast", "autograd", "batching", "fake", "flops", "merge", "sharding"]


def attention(**arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator attention. Omitted arguments are None; max_seqlen_q and max_seqlen_k are 0."""
    out, lse, _ = attention_exact(**arguments)
    return out, lse


def attention_exact(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, lse_error): lse + lse_error is what lse was before it was rounded."""
    sharding.register()
    found: tuple[Tensor, Tensor, Tensor] = autograd.call(autograd.Attention, *_listed("attention", arguments))
    return found


def attention_backward(**arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, attn_mask and sinks. Omitted arguments as in attention."""
    found: tuple[Tensor, ...] = autograd.call(autograd.AttentionBackward, *_listed("attention_backward", arguments))
    return found


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator merge."""
    sharding.register()
    out, lse = autograd.call(autograd.Merge, *outs, *lses)
    return out, lse


def _listed(name: str, arguments: dict[str, Any]) -> list[Any]:
    values = {"max_seqlen_q": 0, "max_seqlen_k": 0} | arguments
    return [values.get(x) for x in ARGUMENTS[name]]
