"""The operators by argument name, and all that PyTorch has to know of them: shapes, gradients, batches, autocast."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import autocast, autograd, batching, fake, flops, sharding
from .dropout import draw_seed
from .library import ARGUMENTS

__all__ = ["attention", "autocast", "autograd", "batching", "fake", "flops", "merge", "sharding"]


def attention(**arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator attention. Omitted arguments are None, or 0 if None is not allowed."""
    sharding.register()
    values: dict[str, Any] = {"max_seqlen_q": 0, "max_seqlen_k": 0, "dropout_p": 0.0, "dropout_seed": None} | arguments
    drops = not (type(values["dropout_p"]) is float and values["dropout_p"] == 0)  # a symbolic number may not be 0
    if drops and values["dropout_seed"] is None:
        values["dropout_seed"] = sharding.replicated(draw_seed(values["query"].device), values["query"])
    out, lse, _ = autograd.call(autograd.Attention, *(values.get(name) for name in ARGUMENTS["attention"]))
    return out, lse


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator merge."""
    sharding.register()
    out, lse = autograd.call(autograd.Merge, *outs, *lses)
    return out, lse
