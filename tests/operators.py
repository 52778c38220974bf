"""Arguments for a direct call of torch.ops.flashsoftmax, in the order of the schemas."""

import torch
from torch import Tensor

from cases import LAYOUTS

TENSORS = ("attn_mask", "alibi_slopes", "sinks", "kv_lens", "cu_seqlens_q", "cu_seqlens_k", "block_table")
NUMBERS = (
    "max_seqlen_q",
    "max_seqlen_k",
    "scale",
    "softcap",
    "window_left",
    "window_right",
    "q_offset",
    "split_size",
)


def integers(*values, dtype=torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def attention(kind: str = "dense", layout: str = "contiguous", **options) -> dict:
    """Of the operator attention: two sequences of 5 queries and 9 keys, or (varlen) of 5 and 4 each."""
    batch, rows, keys = {"dense": (2, 5, 9), "varlen": (1, 9, 9), "paged": (2, 5, 3)}[kind]
    kv_batch = 4 if kind == "paged" else batch
    query, key, value = (
        LAYOUTS[layout](torch.randn(shape))
        for shape in ((batch, 4, rows, 8), (kv_batch, 2, keys, 8), (kv_batch, 2, keys, 6))
    )
    defaults = dict.fromkeys(TENSORS + NUMBERS) | {
        "max_seqlen_q": 5,
        "max_seqlen_k": 9,
        "scale": 0.3,
        "softcap": 0.0,
    }
    if kind == "varlen":
        defaults |= {"cu_seqlens_q": integers(0, 5, 9), "cu_seqlens_k": integers(0, 4, 9)}
    if kind == "paged":
        defaults |= {"block_table": integers([2, 0, 3], [1, 2, -1]), "kv_lens": integers(9, 5)}
    return {"query": query, "key": key, "value": value} | defaults | options


def attention_backward(
    forward: dict, grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> dict:
    """Of the operator attention_backward, after a forward of these arguments."""
    inputs = {name: forward[name] for name in ("query", "key", "value")}
    rest = {name: forward[name] for name in TENSORS[:-1] + NUMBERS[:-1]}
    mask = forward["attn_mask"]
    mask_grad = {"mask_grad": mask is not None and mask.is_floating_point()}
    return {"grad_out": grad_out, "grad_lse": grad_lse} | inputs | {"out": out, "lse": lse} | rest | mask_grad
