"""Arguments for a direct call of torch.ops.flashsoftmax, in the order of the schemas."""

import torch
from torch import Tensor

from cases import LAYOUTS
from flashsoftmax.library import ARGUMENTS


def integers(*values, dtype=torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def attention(kind: str = "dense", layout: str = "contiguous", **options) -> dict:
    """Arguments of the operator attention: two sequences of 5 queries and 9 keys, or (varlen) of 5 and 4 each."""
    batch, rows, keys = {"dense": (2, 5, 9), "varlen": (1, 9, 9), "paged": (2, 5, 3)}[kind]
    kv_batch = 4 if kind == "paged" else batch
    query, key, value = (
        LAYOUTS[layout](torch.randn(shape))
        for shape in ((batch, 4, rows, 8), (kv_batch, 2, keys, 8), (kv_batch, 2, keys, 6))
    )
    values = dict.fromkeys(ARGUMENTS["attention"])
    values |= {"query": query, "key": key, "value": value}
    values |= {"max_seqlen_q": 5, "max_seqlen_k": 9, "scale": 0.3, "softcap": 0.0, "dropout_p": 0.0}
    if kind == "varlen":
        values |= {"cu_seqlens_q": integers(0, 5, 9), "cu_seqlens_k": integers(0, 4, 9)}
    if kind == "paged":
        values |= {"block_table": integers([2, 0, 3], [1, 2, -1]), "kv_lens": integers(9, 5)}
    return values | options


def attention_backward(
    forward: dict,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_error: Tensor | None = None,
) -> dict:
    """Arguments of attention_backward, after a forward of these."""
    values = forward | {"grad_out": grad_out, "grad_lse": grad_lse, "out": out, "lse": lse, "lse_error": lse_error}
    values |= {"bias_grad": forward["attn_bias"] is not None}
    return {name: values[name] for name in ARGUMENTS["attention_backward"]}
