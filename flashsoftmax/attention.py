"""The public functions: they complete the options and call one operator each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import ops

Window: TypeAlias = tuple[int | None, int | None]


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_offset: int | None = None,
    kv_lens: Tensor | None = None,
    split_size: int | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_offset: int | None = None,
    kv_lens: Tensor | None = None,
    split_size: int | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_offset: int | None = None,
    kv_lens: Tensor | None = None,
    split_size: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of each query over the keys that it sees.

    The score of query i and key j is ``scale * q_i . k_j``, then softcap, ALiBi and a float mask, in this order. Hidden
    keys have weight 0. A query that sees no key has output 0, lse -inf (with a sink: the sink) and gradients 0.

    Args:
        query: [B, Hq, Sq, Dqk], float16, bfloat16, float32 or float64. Any strides.
        key: [B, Hkv, Sk, Dqk]. Hq is a multiple of Hkv, and query head h reads key head ``h // (Hq / Hkv)``.
        value: [B, Hkv, Sk, Dv]. Dqk and Dv are at most 256.
        attn_mask: broadcastable to [B, Hq, Sq, Sk]. Boolean: True lets attend. Floating: added to the scores; -inf
            hides.
        causal: hide the keys behind the query: j > i + q_offset.
        window: (left, right): hide j < i + q_offset - left and j > i + q_offset + right. None is no bound, 0 is one: a
            window of (left, 0) sees left + 1 keys, the query's own included.
        scale: of the scores; 1 / sqrt(Dqk) unless given.
        softcap: c > 0 turns a score s into ``c * tanh(s / c)``; None or 0 leaves it.
        alibi_slopes: [Hq]: adds ``-slope * abs(i + q_offset - j)`` (Press et al., 2022, arXiv:2108.12409). They have no
            gradient.
        sinks: [Hq]: the score of one more key, whose value is 0 (after Xiao et al., 2023, arXiv:2309.17453). It counts
            in lse.
        q_offset: position of query 0 among the keys; kv_len - Sq unless given, which aligns the last query with the
            last key.
        kv_lens: [B], int32 or int64: keys and values from kv_lens[b] on are not read.
        split_size: keys a split, for split-KV, rounded up to whole tiles. The result's bits depend on it, and on
            neither batch, heads nor threads.
        return_lse: return (out, lse).

    Returns:
        out [B, Hq, Sq, Dv] in the dtype of query, stored with heads inside rows where query is; and where asked for
        lse [B, Hq, Sq], the natural logarithm of the sum of the exponentials of the scores, float32 (float64 for
        float64). Both are differentiable.

    Raises:
        TypeError: an argument is no tensor. ValueError: a shape, dtype, device or value that does not fit.
    """
    _check_tensors(query=query, key=key, value=value, attn_mask=attn_mask, kv_lens=kv_lens)
    if query.dim() == 4 and key.dim() == 4:
        attn_mask = _expand_mask(attn_mask, (query.size(0), query.size(1), query.size(2), key.size(2)))
    options = _Options(causal, window, scale, softcap, alibi_slopes, sinks, q_offset, split_size)
    out, lse = options.attend(query, key, value, attn_mask, kv_lens)
    return (out, lse) if return_lse else out


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_offset: int | None = None,
    kv_lens: Tensor | None = None,
    split_size: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of several sequences that follow each other without padding.

    The options are those of :func:`attention`, each sequence taken by itself: positions count from its first query and
    key.

    Args:
        query: [Tq, Hq, Dqk], the rows of all sequences.
        key: [Tk, Hkv, Dqk].
        value: [Tk, Hkv, Dv].
        cu_seqlens_q: [sequences + 1], int32 or int64: sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
            It starts with 0, does not fall, and ends with Tq.
        cu_seqlens_k: likewise for key and value.
        max_seqlen_q: at least the length of the longest sequence of queries. The result's bits may depend on it.
        max_seqlen_k: at least the length of the longest sequence of keys.
        kv_lens: [sequences]: keys of a sequence that are read.

    Returns:
        out [Tq, Hq, Dv], and where asked for lse [Hq, Tq], as :func:`attention` has them.

    Raises:
        TypeError: an argument is no tensor. ValueError: a shape, dtype, device or value that does not fit.
    """
    _check_tensors(query=query, key=key, value=value, kv_lens=kv_lens)
    _check_tensors(required=True, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise ValueError(f"{name}: {x.dim()} dimensions, wanted 3: [tokens, heads, head_dim]")
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    options = _Options(causal, window, scale, softcap, alibi_slopes, sinks, q_offset, split_size)
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        _check_int(name, length)
    out, lse = options.attend(
        query, key, value, None, kv_lens, cu_seqlens_q, cu_seqlens_k, None, max_seqlen_q, max_seqlen_k
    )
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (out, lse) if return_lse else out


def attention_paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    attn_mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_offset: int | None = None,
    split_size: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over keys and values that lie in pages. Not differentiable.

    The options are those of :func:`attention`.

    Args:
        query: [B, Hq, Sq, Dqk].
        key_pages: [pages, page_size, Hkv, Dqk], any page size and strides.
        value_pages: [pages, page_size, Hkv, Dv].
        block_table: [B, n], int32 or int64: key j of sequence b is slot ``j % page_size`` of page
            ``block_table[b, j // page_size]``. Entries that kv_lens does not reach may hold anything.
        kv_lens: [B], int32 or int64: keys of each sequence.
        attn_mask: broadcastable to [B, Hq, Sq, n * page_size].

    Returns:
        out [B, Hq, Sq, Dv], and where asked for lse [B, Hq, Sq], as :func:`attention` has them.

    Raises:
        TypeError: an argument is no tensor. ValueError: a shape, dtype, device, length or page that does not fit.
    """
    _check_tensors(query=query, key_pages=key_pages, value_pages=value_pages, attn_mask=attn_mask)
    _check_tensors(required=True, block_table=block_table, kv_lens=kv_lens)
    for name, x in (("key_pages", key_pages), ("value_pages", value_pages)):
        if x.dim() != 4:
            raise ValueError(f"{name}: {x.dim()} dimensions, wanted 4: [pages, page_size, heads, head_dim]")
    if query.dim() == 4 and block_table.dim() == 2:
        keys = block_table.size(1) * key_pages.size(1)
        attn_mask = _expand_mask(attn_mask, (query.size(0), query.size(1), query.size(2), keys))
    key, value = key_pages.transpose(1, 2), value_pages.transpose(1, 2)
    options = _Options(causal, window, scale, softcap, alibi_slopes, sinks, q_offset, split_size)
    out, lse = options.attend(query, key, value, attn_mask, kv_lens, block_table=block_table)
    return (out, lse) if return_lse else out


def merge(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """The attention over all keys, from its results over disjoint parts of them.

    Args:
        outs: the states' outputs, [B, H, S, D] or [T, H, D] each; a sequence, or a tensor with a leading axis of
            states.
        lses: their lse (natural logarithm), [B, H, S] or [H, T] each, float32 (float64 for float64). A state with an
            lse of -inf, or +inf as flash-attn 2 writes it, is empty, and its output is not read.

    Returns:
        (out, lse) in the same layout, differentiable. A row that is empty in all states has output 0 and lse -inf.

    Raises:
        TypeError: an argument is no tensor. ValueError: no states, or states that do not fit each other.
    """
    outs, lses = _states("outs", outs), _states("lses", lses)
    if not outs:
        raise ValueError("outs: no states, wanted at least one")
    varlen = outs[0].dim() == 3
    if varlen:
        for n, x in enumerate(outs):
            if x.dim() != 3:
                raise ValueError(f"outs[{n}]: {x.dim()} dimensions, wanted 3 as outs[0]")
        for n, x in enumerate(lses):
            if x.dim() != 2:
                raise ValueError(f"lses[{n}]: {x.dim()} dimensions, wanted 2: [heads, tokens]")
        outs, lses = [x.transpose(0, 1).unsqueeze(0) for x in outs], [x.unsqueeze(0) for x in lses]
    _check_no_forward_ad(*outs, *lses)
    out, lse = ops.merge(outs, lses)
    return (out.squeeze(0).transpose(0, 1), lse.squeeze(0)) if varlen else (out, lse)


@dataclass(frozen=True)
class _Options:
    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    q_offset: int | None
    split_size: int | None

    def __post_init__(self) -> None:
        _check_tensors(alibi_slopes=self.alibi_slopes, sinks=self.sinks)
        if self.alibi_slopes is not None and self.alibi_slopes.requires_grad:
            raise ValueError("alibi_slopes: requires_grad is True, wanted False: slopes have no gradient")
        _check_int("q_offset", self.q_offset)
        _check_int("split_size", self.split_size)
        for name, x in (("scale", self.scale), ("softcap", self.softcap)):
            if x is not None and not isinstance(x, (int, float, torch.SymInt, torch.SymFloat)):
                raise TypeError(f"{name}: {x!r}, wanted a number")

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        kv_lens: Tensor | None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        block_table: Tensor | None = None,
        max_seqlen_q: int = 0,
        max_seqlen_k: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of operands in the operator's layout: [batch, heads, rows, dim]."""
        _check_no_forward_ad(query, key, value, attn_mask, self.sinks)
        head_dim = query.size(-1) if query.dim() else 1
        scale = 1.0 / math.sqrt(max(head_dim, 1)) if self.scale is None else self.scale
        left, right = _bounds(self.window)
        return ops.attention(
            query,
            key,
            value,
            attn_mask,
            _per_head("alibi_slopes", self.alibi_slopes, query),
            _per_head("sinks", self.sinks, query),
            kv_lens,
            cu_seqlens_q,
            cu_seqlens_k,
            block_table,
            max_seqlen_q,
            max_seqlen_k,
            float(scale),
            float(self.softcap or 0.0),
            left,
            0 if self.causal else right,
            self.q_offset,
            self.split_size,
        )


def _states(name: str, states: object) -> list[Tensor]:
    if not isinstance(states, (Tensor, Sequence)) or (isinstance(states, Tensor) and states.dim() == 0):
        raise TypeError(f"{name}: {type(states).__name__}, wanted a sequence of Tensors or a Tensor of states")
    states = list(states)
    _check_tensors(required=True, **{f"{name}[{n}]": x for n, x in enumerate(states)})
    return states


def _bounds(window: Window | None) -> Window:
    if window is None:
        return None, None
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise TypeError(f"window: {window!r}, wanted a pair (left, right) of int or None")
    for name, bound in zip(("left", "right"), window, strict=True):
        _check_int(f"window: {name}", bound)
        if bound is not None and bound < 0:
            raise ValueError(f"window: {name} is {bound}, wanted at least 0, or None for no bound")
    return window[0], window[1]


def _check_int(name: str, x: object) -> None:
    if x is not None and (isinstance(x, bool) or not isinstance(x, (int, torch.SymInt))):
        raise TypeError(f"{name}: {x!r}, wanted an int")


def _per_head(name: str, x: Tensor | None, query: Tensor) -> Tensor | None:
    if x is None:
        return None
    statistics = torch.float64 if query.dtype == torch.float64 else torch.float32
    if x.dtype not in (statistics, torch.float32, query.dtype):
        raise ValueError(f"{name}: dtype {x.dtype}, wanted float32 or that of query, {query.dtype}")
    return x.to(statistics)


def _expand_mask(attn_mask: Tensor | None, shape: tuple[int, int, int, int]) -> Tensor | None:
    if attn_mask is None:
        return None
    fits = attn_mask.dim() <= 4 and all(
        have in (1, want) for have, want in zip(reversed(attn_mask.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"attn_mask: shape {list(attn_mask.shape)}, wanted one broadcastable to {list(shape)}")
    return attn_mask.expand(shape)


def _check_tensors(required: bool = False, **arguments: object) -> None:
    for name, x in arguments.items():
        if not isinstance(x, Tensor) and (x is not None or required or name in ("query", "key", "value")):
            raise TypeError(f"{name}: {type(x).__name__}, wanted a Tensor")


def _check_no_forward_ad(*tensors: Tensor | None) -> None:
    if torch.compiler.is_compiling():
        return
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                "forward-mode differentiation of attention is not implemented; use the backward mode"
            )
