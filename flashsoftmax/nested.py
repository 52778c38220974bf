"""Jagged nested tensors: their rows are packed already, so they are the operator's variable-length layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """query, key and value [1, heads, rows of all sequences, dim], and where the sequences lie."""

    operands: tuple[Tensor, Tensor, Tensor]
    lengths: dict[str, Any]
    offsets: Tensor
    max_seqlen: int

    def unpack(self, x: Tensor) -> Tensor:
        """Rows of all sequences, out [1, H, T, D] or lse [1, H, T], as a nested tensor [B, H, jagged, ...]."""
        rows = x.squeeze(0).transpose(0, 1)
        nested = torch.nested.nested_tensor_from_jagged(rows, self.offsets, max_seqlen=self.max_seqlen)
        return nested.transpose(1, 2)


def pack(query: Any, key: Any, value: Any, **unwanted: Tensor | None) -> Packed:  # NestedTensor is not public
    """The variable-length layout of nested tensors [batch, heads, jagged, dim]."""
    for name, x in unwanted.items():
        if x is not None:
            raise ValueError(f"{name}: given together with nested tensors, wanted without")
    operands = {"query": query, "key": key, "value": value}
    for name, x in operands.items():
        if not x.is_nested:
            raise ValueError(f"{name}: not a nested tensor, wanted one as the others")
        if x.layout != torch.jagged:
            raise ValueError(f"{name}: a nested tensor of layout {x.layout}, wanted torch.jagged")
        if x.dim() != 4 or x._ragged_idx != 2:
            raise ValueError(
                f"{name}: nested tensor of shape {tuple(x.shape)}, wanted [batch, heads, jagged, head_dim]"
            )
        if x.lengths() is not None:
            raise ValueError(f"{name}: a nested tensor with gaps between its sequences, wanted one without")
    if key.size(2) != value.size(2):
        raise ValueError("value: other offsets than those of key, wanted the same tensor of offsets")
    lengths = {
        "cu_seqlens_q": query.offsets(),
        "cu_seqlens_k": key.offsets(),
        "max_seqlen_q": query._get_max_seqlen(),
        "max_seqlen_k": key._get_max_seqlen(),
    }
    values = tuple(x.values().unsqueeze(0) for x in operands.values())
    return Packed((values[0], values[1], values[2]), lengths, query.offsets(), lengths["max_seqlen_q"])
