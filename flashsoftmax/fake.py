"""Shapes and strides of the operators' results, for tracing and for the device meta.

Shapes, dtypes, devices and numbers are checked as in csrc/ops/parameters.h, with the same messages. The values of
lengths are checked when the operator runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .library import ARGUMENTS, statistics
from .options import PER_HEAD

MAX_HEAD_DIM = 256
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check(condition: Any, message: str) -> None:
    torch._check_value(condition, lambda: message)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_device(name: str, x: Tensor, like: Tensor) -> None:
    _check(x.device == like.device, f"{name}: device {x.device}, wanted that of the other tensors, {like.device}")


def _check_shape(name: str, x: Tensor, wanted: tuple[Any, ...]) -> None:
    message = f"{name}: shape {[*x.shape]}, wanted {[*wanted]}"
    _check(x.dim() == len(wanted), message)
    for have, want in zip(x.shape, wanted, strict=True):
        _check(have == want, message)


def _check_like(name: str, x: Tensor, shape: tuple[Any, ...], like: Tensor, dtype: torch.dtype) -> None:
    _check_shape(name, x, shape)
    _check(x.dtype == dtype, f"{name}: dtype {_name(x.dtype)}, wanted {_name(dtype)}")
    _check_device(name, x, like)


def _check_lengths(name: str, x: Tensor, dim: int, like: Tensor) -> None:
    _check(x.dim() == dim, f"{name}: {x.dim()} dimensions, wanted {dim}")
    _check(x.dtype in (torch.int32, torch.int64), f"{name}: dtype {_name(x.dtype)}, wanted int32 or int64")
    _check_device(name, x, like)


def _check_operands(query: Tensor, key: Tensor, value: Tensor, paged: bool, varlen: bool) -> None:
    key_name, value_name = ("key_pages", "value_pages") if paged and not varlen else ("key", "value")
    dtype = _name(query.dtype)
    for name, x in (("query", query), (key_name, key), (value_name, value)):
        _check(x.dim() == 4, f"{name}: {x.dim()} dimensions, wanted 4")
        _check(x.dtype == query.dtype, f"{name}: dtype {_name(x.dtype)}, wanted that of query, {dtype}")
        _check_device(name, x, query)
        _check(x.size(3) <= MAX_HEAD_DIM, f"{name}: head_dim {x.size(3)}, wanted at most {MAX_HEAD_DIM}")
    _check(query.dtype in FLOATING, f"query: dtype {dtype}, wanted float16, bfloat16, float32 or (on the CPU) float64")
    batch, heads, _, head_dim = query.shape
    if not paged:
        _check(key.size(0) == batch, f"key: batch {key.size(0)}, wanted that of query, {batch}")
    _check(key.size(3) == head_dim, f"{key_name}: head_dim {key.size(3)}, wanted that of query, {head_dim}")
    for d, name in enumerate(("pages", "heads", "page_size") if paged else ("batch", "heads", "keys")):
        message = f"{value_name}: {name} {value.size(d)}, wanted that of {key_name}, {key.size(d)}"
        _check(value.size(d) == key.size(d), message)
    heads_kv = key.size(1)
    fits = heads % heads_kv == 0 if heads_kv > 0 else heads == 0
    _check(fits, f"query: {heads} heads, wanted a multiple of the heads of {key_name}, {heads_kv}")


def _check_numbers(values: dict[str, Any], statistics: torch.dtype) -> None:
    """Checks the numbers that are not symbolic."""
    name, largest = _name(statistics), torch.finfo(statistics).max
    scale, softcap = values["scale"], values["softcap"]
    if type(scale) is float:
        _check(
            math.isfinite(scale) and abs(scale) <= largest,
            f"scale: {scale:g}, wanted a number that is finite in {name}",
        )
    if type(softcap) is float:
        rounded = float(torch.tensor(softcap, dtype=statistics))
        _check(
            softcap == 0 or 0 < rounded < math.inf,
            f"softcap: {softcap:g}, wanted a number that is positive and finite in {name}, or 0 for none",
        )
    for name in ("window_left", "window_right"):
        if type(values[name]) is int:
            _check(values[name] >= 0, f"{name}: {values[name]}, wanted at least 0, or None for no bound")
    dropout_p = values["dropout_p"]
    if type(dropout_p) is float:
        _check(0 <= dropout_p <= 1, f"dropout_p: {dropout_p:g}, wanted 0 to 1")
        missing = dropout_p > 0 and values["dropout_seed"] is None
        _check(not missing, "dropout_seed: missing, wanted with dropout_p")
    q_offset, split_size = values["q_offset"], values.get("split_size")
    if type(q_offset) is int:
        _check(abs(q_offset) <= 2**40, f"q_offset: {q_offset}, wanted between -2^40 and 2^40")
    if type(split_size) is int:
        _check(split_size > 0, f"split_size: {split_size}, wanted at least 1")


def _check_attention(values: dict[str, Any]) -> None:
    query, key, value = values["query"], values["key"], values["value"]
    cu_q, cu_k, block_table = values["cu_seqlens_q"], values["cu_seqlens_k"], values.get("block_table")
    kv_lens = values["kv_lens"]
    _check_operands(query, key, value, paged=block_table is not None, varlen=cu_q is not None)

    varlen = cu_q is not None or cu_k is not None
    sequences, keys = query.size(0), key.size(2)
    _check(cu_k is None or block_table is None, "block_table: given together with cu_seqlens_k, wanted one of them")
    if varlen:
        if cu_q is None or (cu_k is None and block_table is None):
            raise ValueError("cu_seqlens_q, cu_seqlens_k: one of them is missing, wanted both")
        _check_lengths("cu_seqlens_q", cu_q, 1, query)
        _check(cu_q.numel() >= 1, "cu_seqlens_q: no elements, wanted the number of sequences + 1")
        _check(query.size(0) == 1, f"query: batch {query.size(0)}, wanted 1 with cu_seqlens")
        for name in ("max_seqlen_q", "max_seqlen_k"):
            _check(values[name] >= 0, f"{name}: {values[name]}, wanted at least 0")
        sequences = cu_q.numel() - 1
    if cu_k is not None:
        _check_lengths("cu_seqlens_k", cu_k, 1, query)
        _check_shape("cu_seqlens_k", cu_k, tuple(cu_q.shape))
    if block_table is not None:
        _check_lengths("block_table", block_table, 2, query)
        wanted = f"the number of sequences, {sequences}" if varlen else f"the batch, {sequences}"
        _check(block_table.size(0) == sequences, f"block_table: {block_table.size(0)} rows, wanted {wanted}")
        _check(kv_lens is not None, "kv_lens: missing, wanted with block_table")
        columns, page_size = block_table.size(1), key.size(2)
        if type(columns) is int and type(page_size) is int:
            most = 2**60 // max(page_size, 1)
            _check(columns <= most, f"block_table: {columns} columns, wanted at most {most}")
        keys = columns * page_size
    _check(not (varlen and values["q_lens"] is not None), "q_lens: given together with cu_seqlens, wanted without")
    for name in ("q_lens", "kv_lens", "kv_starts"):
        if values[name] is not None:
            _check_lengths(name, values[name], 1, query)
            _check_shape(name, values[name], (sequences,))

    _check_numbers(values, statistics(query.dtype))
    if (seed := values["dropout_seed"]) is not None:
        _check_like("dropout_seed", seed, (2,), query, torch.int64)
    for name in PER_HEAD:
        if values[name] is not None:
            per_sequence = name == "alibi_slopes" and values[name].dim() == 2
            shape = (sequences, query.size(1)) if per_sequence else (query.size(1),)
            _check_like(name, values[name], shape, query, statistics(query.dtype))
    for name, dtypes, wanted in (("attn_mask", (torch.bool,), "bool"), ("attn_bias", FLOATING, "a floating dtype")):
        x = values[name]
        if x is None:
            continue
        _check(not varlen, f"{name}: given together with cu_seqlens, wanted without")
        scores = [sequences, query.size(1), query.size(2), keys]
        message = f"{name}: shape {[*x.shape]}, wanted one broadcastable to {scores}"
        _check(x.dim() == 4, message)
        for have, want in zip(x.shape, scores, strict=True):
            _check(have == 1 or have == want, message)
        _check_device(name, x, query)
        _check(x.dtype in dtypes, f"{name}: dtype {_name(x.dtype)}, wanted {wanted}")


def _empty_like_layout(like: Tensor, dims: int) -> Tensor:
    """Stored as [batch, rows, heads, dims] if `like` is, else contiguous."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    batch, heads, rows, _ = like.shape
    if guard_or_false(like.stride(1) < like.stride(2)):
        return like.new_empty((batch, rows, heads, dims)).transpose(1, 2)
    return like.new_empty((batch, heads, rows, dims))


def _check_output(name: str, x: Tensor, shape: tuple[Any, ...], like: Tensor, dtype: torch.dtype) -> None:
    """A tensor that is written: each of its elements needs memory of its own."""
    _check_like(name, x, shape, like, dtype)
    for d, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        _check(stride != 0 or size <= 1, f"{name}: axis {d} is expanded, wanted memory for each element")


def _check_backward(values: dict[str, Any]) -> None:
    _check_attention(values)
    query, lse = values["query"], values["lse"]
    rows, lse_dtype = tuple(query.shape[:3]), statistics(query.dtype)
    out_shape = (*rows, values["value"].size(3))
    _check_like("out", values["out"], out_shape, query, query.dtype)
    _check_like("lse", lse, rows, query, lse_dtype)
    for name, shape, dtype in (
        ("lse_error", rows, lse_dtype),
        ("grad_out", out_shape, query.dtype),
        ("grad_lse", rows, lse_dtype),
    ):
        if values[name] is not None:
            _check_like(name, values[name], shape, query, dtype)
    if values["bias_grad"]:
        _check(values["attn_bias"] is not None, "bias_grad: True without attn_bias, wanted False")


def _other_gradients(values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Of attn_bias and sinks."""
    lse, attn_bias, sinks = values["lse"], values["attn_bias"], values["sinks"]
    return (
        lse.new_empty(attn_bias.shape if values["bias_grad"] else (0,)),
        lse.new_empty(sinks.shape if sinks is not None else (0,)),
    )


@torch.library.register_fake("flashsoftmax::attention")
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    values = dict(zip(ARGUMENTS["attention"], args, strict=True))
    _check_attention(values)
    query: Tensor = values["query"]
    lse, lse_error = (query.new_empty(query.shape[:3], dtype=statistics(query.dtype)) for _ in range(2))
    return _empty_like_layout(query, values["value"].size(3)), lse, lse_error


@torch.library.register_fake("flashsoftmax::attention_out")
def _(*args: Any) -> None:
    values = dict(zip(ARGUMENTS["attention_out"], args, strict=True))
    _check_attention(values)
    query, rows = values["query"], tuple(values["query"].shape[:3])
    _check_output("out", values["out"], (*rows, values["value"].size(3)), query, query.dtype)
    _check_output("lse", values["lse"], rows, query, statistics(query.dtype))


@torch.library.register_fake("flashsoftmax::attention_backward")
def _(*args: Any) -> tuple[Tensor, ...]:
    values = dict(zip(ARGUMENTS["attention_backward"], args, strict=True))
    _check_backward(values)
    grads = (_empty_like_layout(values[name], values[name].size(3)) for name in ("query", "key", "value"))
    return *grads, *_other_gradients(values)


@torch.library.register_fake("flashsoftmax::attention_backward_out")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    values = dict(zip(ARGUMENTS["attention_backward_out"], args, strict=True))
    _check_backward(values)
    query = values["query"]
    for name in ("query", "key", "value"):
        _check_output(f"grad_{name}", values[f"grad_{name}"], tuple(values[name].shape), query, query.dtype)
    return _other_gradients(values)


def _check_states(outs: list[Tensor], lses: list[Tensor]) -> None:
    _check(len(outs) > 0, "outs: no states, wanted at least one")
    _check(len(outs) == len(lses), f"lses: {len(lses)} states, wanted as many as outs, {len(outs)}")
    for n, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        _check(out.dim() == 4, f"outs[{n}]: {out.dim()} dimensions, wanted 4")
        _check_like(f"outs[{n}]", out, tuple(outs[0].shape), outs[0], outs[0].dtype)
        _check_like(f"lses[{n}]", lse, tuple(outs[0].shape[:3]), outs[0], statistics(outs[0].dtype))
    dtype = outs[0].dtype
    _check(dtype in FLOATING, f"outs[0]: dtype {_name(dtype)}, wanted float16, bfloat16, float32 or float64")


@torch.library.register_fake("flashsoftmax::merge")
def _(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    _check_states(outs, lses)
    return _empty_like_layout(outs[0], outs[0].size(3)), lses[0].new_empty(lses[0].shape)


@torch.library.register_fake("flashsoftmax::merge_backward")
def _(
    grad_out: Tensor | None, grad_lse: Tensor | None, outs: list[Tensor], lses: list[Tensor]
) -> tuple[Tensor, Tensor]:
    _check_states(outs, lses)
    for name, x, like in (("grad_out", grad_out, outs[0]), ("grad_lse", grad_lse, lses[0])):
        if x is not None:
            _check_like(name, x, tuple(like.shape), like, like.dtype)
    return tuple(xs[0].new_empty((len(xs), *xs[0].shape)) for xs in (outs, lses))  # type: ignore[return-value]


def _check_floating(name: str, x: Tensor) -> None:
    wanted = "float16, bfloat16, float32 or (on the CPU) float64"
    _check(x.dtype in FLOATING, f"{name}: dtype {_name(x.dtype)}, wanted {wanted}")


def _check_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        _check(table.dim() == 2, f"{name}: {table.dim()} dimensions, wanted 2")
        _check_like(name, table, tuple(cos.shape), x, cos.dtype)
    dtypes = (x.dtype, statistics(x.dtype))
    message = f"rotary_cos: dtype {_name(cos.dtype)}, wanted {_name(dtypes[0])} or {_name(dtypes[1])}"
    _check(cos.dtype in dtypes, message)
    message = f"rotary_cos: {cos.size(1)} columns, wanted at most half of head_dim, {x.size(3)}"
    _check(2 * cos.size(1) <= x.size(3), message)


@torch.library.register_fake("flashsoftmax::append_kv")
def _(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    kv_lens: Tensor,
    block_table: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_interleaved: bool,
) -> None:
    for name, x in (("key", key), ("value", value), ("key_cache", key_cache), ("value_cache", value_cache)):
        _check(x.dim() == 4, f"{name}: {x.dim()} dimensions, wanted 4")
        _check(x.dtype == key.dtype, f"{name}: dtype {_name(x.dtype)}, wanted that of key, {_name(key.dtype)}")
        _check_device(name, x, key)
    _check_floating("key", key)
    (batch, heads, _, dim), (slots, _, slot_rows, _) = key.shape, key_cache.shape
    _check_shape("value", value, (*key.shape[:3], value.size(3)))
    _check_shape("key_cache", key_cache, (slots, heads, slot_rows, dim))
    _check_shape("value_cache", value_cache, (slots, heads, slot_rows, value.size(3)))
    _check_lengths("kv_lens", kv_lens, 1, key)
    _check_shape("kv_lens", kv_lens, (batch,))
    if block_table is None:
        _check(batch <= slots, f"key_cache: batch {slots}, wanted at least that of key, {batch}")
    else:
        _check_lengths("block_table", block_table, 2, key)
        rows = block_table.size(0)
        _check(rows == batch, f"block_table: {rows} rows, wanted the batch, {batch}")
    if rotary_cos is None or rotary_sin is None:
        given = rotary_cos is not None or rotary_sin is not None
        _check(not given, "rotary_cos, rotary_sin: one of them is missing, wanted both")
    else:
        _check_rotary(key, rotary_cos, rotary_sin)


@torch.library.register_fake("flashsoftmax::rotary")
def _(
    query: Tensor,
    rotary_cos: Tensor,
    rotary_sin: Tensor,
    positions: Tensor,
    rotary_interleaved: bool,
    same_position: bool,
) -> Tensor:
    _check(query.dim() == 4, f"query: {query.dim()} dimensions, wanted 4")
    _check_floating("query", query)
    _check_lengths("positions", positions, 1, query)
    _check_shape("positions", positions, (query.size(0),))
    _check_rotary(query, rotary_cos, rotary_sin)
    return _empty_like_layout(query, query.size(3))
