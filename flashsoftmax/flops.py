"""FLOPs of the operators, for torch.utils.flop_counter.FlopCounterMode.

They count as those of PyTorch's own attention: two products in the forward and five in the backward, over all pairs of
a query and a key of one sequence, hidden ones too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .library import ARGUMENTS, OPERATORS


def _by_name(name: str, formula: Callable[[dict[str, Any]], int]) -> Callable[..., int]:
    def wrapper(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return formula(dict(zip(ARGUMENTS[name], args, strict=False)) | kwargs)

    return wrapper


def _forward(values: dict[str, Any]) -> Any:
    return 2 * _pairs(values) * (values["query"].size(3) + values["value"].size(3))


def _backward(values: dict[str, Any]) -> Any:
    return 2 * _pairs(values) * (3 * values["query"].size(3) + 2 * values["value"].size(3))


def _pairs(values: dict[str, Any]) -> Any:
    """Pairs of a query and a key, in all query heads."""
    batch, heads, rows, _ = values["query"].shape
    keys: int = values["key"].size(2)
    if values.get("block_table") is not None:
        keys *= values["block_table"].size(1)
    cu_seqlens_q, cu_seqlens_k = values["cu_seqlens_q"], values["cu_seqlens_k"]
    if cu_seqlens_q is None or cu_seqlens_k is None:  # or in pages: all keys that the block table can hold
        return batch * heads * rows * keys
    if _is_readable(cu_seqlens_q) and _is_readable(cu_seqlens_k):
        return heads * int((cu_seqlens_q.diff().long() * cu_seqlens_k.diff().long()).sum())
    longest = min(rows, values["max_seqlen_q"]) * min(keys, values["max_seqlen_k"])
    return heads * min((cu_seqlens_q.numel() - 1) * longest, rows * keys)


def _is_readable(x: Tensor) -> bool:
    from torch._subclasses import FakeTensor

    return not (x.is_meta or isinstance(x, FakeTensor))


for _name, _formula in (("attention", _forward), ("attention_backward", _backward)):
    register_flop_formula(OPERATORS[_name].overloadpacket, get_raw=True)(_by_name(_name, _formula))
