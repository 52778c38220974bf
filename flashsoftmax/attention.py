"""The public functions. Each checks and completes its arguments and calls one operator."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant
from typing_extensions import Unpack

from . import nested, ops
from .options import Options, check_int, check_tensor, complete, entry_point


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    kv_lens: Tensor | None = None,
    attn_bias: Tensor | None = None,
    q_lens: Tensor | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    kv_lens: Tensor | None = None,
    attn_bias: Tensor | None = None,
    q_lens: Tensor | None = None,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@entry_point
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    kv_lens: Tensor | None = None,
    attn_bias: Tensor | None = None,
    q_lens: Tensor | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of each query over the keys that it sees.

    The score of query i and key j is ``scale * q_i . k_j``; softcap, ALiBi and the bias are applied in this order.
    Hidden keys have weight 0. A query that sees no key has output 0, lse -inf (with a sink: the sink) and gradients 0.

    Args:
        query: [B, Hq, Sq, Dqk], float16, bfloat16 or float32; on the CPU also float64. Any strides. Or a jagged nested
            tensor [B, Hq, jagged, Dqk], as key and value then are; the result is jagged too.
        key: [B, Hkv, Sk, Dqk]. Hq is a multiple of Hkv, and query head h reads key head ``h // (Hq / Hkv)``.
        value: [B, Hkv, Sk, Dv]. Dqk and Dv are at most 256.
        attn_mask: broadcastable to [B, Hq, Sq, Sk]. Boolean: True lets attend. Floating: added to the scores; -inf
            hides. Or a ``torch.nn.attention.bias.CausalBias``, which costs no memory.
        kv_lens: [B], int32 or int64: keys and values from kv_lens[b] on are not read.
        attn_bias: floating, broadcastable to [B, Hq, Sq, Sk], beside a bool attn_mask (or none): added to the scores,
            and -inf hides. Each keeps its own broadcast axes, so a bias [1, Hq, Sq, Sk] and a mask [B, 1, 1, Sk] are
            not expanded. A float attn_mask is such a bias itself: pass that or attn_bias, not both.
        q_lens: [B], int32 or int64: queries from q_lens[b] on are padding. They are not read; their output is 0, their
            lse -inf and their gradient 0. A right-padded batch is ``q_lens=lens, kv_lens=lens``.
        causal: hide the keys after the query: j > i + q_offset.
        window: (left, right): hide j < i + q_offset - left and j > i + q_offset + right. None is no bound, 0 is one: a
            window of (left, 0) sees left + 1 keys, the query's own included.
        scale: factor of q.k; 1 / sqrt(Dqk) if omitted.
        softcap: c > 0 turns a score s into ``c * tanh(s / c)``; None or 0 leaves it.
        alibi_slopes: [Hq] or, per sequence, [B, Hq]: adds ``-slope * abs(i + q_offset - j)`` (Press et al., 2022,
            arXiv:2108.12409). No gradient.
        sinks: [Hq]: the score of one more key per head, whose value is 0 (after Xiao et al., 2023, arXiv:2309.17453).
            It counts in lse.
        q_offset: position of query 0 among the keys; kv_len - q_len if omitted, which aligns the last query with the
            last key (q_len is Sq without q_lens).
            ``scaled_dot_product_attention(is_causal=True)`` aligns query 0 with key 0 instead. The two differ where
            Sk > Sq, as in a static cache: pass kv_lens there, or q_offset=0 for the alignment of torch.
        kv_starts: [B], int32 or int64: keys and values before kv_starts[b], such as left padding, are hidden and not
            read. Positions do not change. The result is bitwise that of the keys from kv_starts[b] on alone. A sequence
            with kv_starts[b] >= kv_len sees no key.
        split_size: keys per split, rounded up to whole tiles. The bits of the result depend on it, but not on batch,
            heads or threads.
        dropout_p: the probability that a weight is dropped; those that are kept are divided by 1 - dropout_p. For
            training: like ``scaled_dot_product_attention``, the function does not know whether a module is in training.
            lse is that of all weights.
        dropout_seed: int64 [2]. Calls of the same seed drop the same weights, which :func:`dropout_mask` returns. Drawn
            from torch's generator if omitted.
        return_lse: return (out, lse).

    Returns:
        out [B, Hq, Sq, Dv] in the dtype of query. Stored as [B, Sq, Hq, Dv] if query is, else contiguous.
        With return_lse also lse [B, Hq, Sq], the natural logarithm of the sum of the exponentials of the scores,
        float32 (float64 for float64). Both are differentiable.

    Raises:
        TypeError: an argument is of a type that it cannot have. ValueError: a shape, dtype, device or value does not
        fit.
    """
    _check_tensors(query=query, key=key, value=value)
    lengths = _given(kv_lens=kv_lens, q_lens=q_lens)
    masks = _given(attn_mask=attn_mask, attn_bias=attn_bias)
    if lengths:
        _warn_of_alignment(query, kv_lens, q_lens, options)
    if query.is_nested or key.is_nested or value.is_nested:
        packed = nested.pack(query, key, value, **masks)
        out, lse = _attend(*packed.operands, complete(query, options), **(lengths | packed.lengths))
        out, lse = packed.unpack(out), packed.unpack(lse)
        return (out, lse) if return_lse else out
    if masks:
        if isinstance(attn_mask, CausalBias) and query.dim() == key.dim() == 4:
            masks, options = _causal_bias(masks, (*query.shape[:3], key.size(2)), options)
        masks = _by_kind(query, masks, key.size(2) if key.dim() == 4 else None)
    out, lse = _attend(query, key, value, complete(query, options), **masks, **lengths)
    return (out, lse) if return_lse else out


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    kv_lens: Tensor | None = None,
    block_table: Tensor | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    kv_lens: Tensor | None = None,
    block_table: Tensor | None = None,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@entry_point
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    kv_lens: Tensor | None = None,
    block_table: Tensor | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of several sequences that follow each other without padding.

    The options are those of :func:`attention`, applied to each sequence by itself: positions count from its first query
    and its first key. Dropout drops the weights that it drops in a padded batch with sequence b as batch entry b.

    With a block_table the keys lie in pages, as in :func:`attention_paged`. One call then serves sequences in prefill,
    chunks of prefill and sequences in decode. A sequence of up to 16 queries takes the decode kernel, whatever the
    lengths of the others. Pages are not differentiable.

    Args:
        query: [Tq, Hq, Dqk], the rows of all sequences.
        key: [Tk, Hkv, Dqk]; in pages [pages, page_size, Hkv, Dqk].
        value: [Tk, Hkv, Dv]; in pages [pages, page_size, Hkv, Dv].
        cu_seqlens_q: [sequences + 1], int32 or int64: sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
            It starts with 0, does not fall, and ends with Tq.
        cu_seqlens_k: likewise for key and value. Omitted in pages, where kv_lens and block_table say where keys are.
        max_seqlen_q: at least the length of the longest sequence of queries. The result's bits may depend on it.
        max_seqlen_k: at least the length of the longest sequence of keys. Omitted in pages.
        kv_lens: [sequences]: how many keys of each sequence are read.
        block_table: [sequences, n], as in :func:`attention_paged`; kv_lens is then required.
        return_lse: return (out, lse).

    Returns:
        out [Tq, Hq, Dv], and with return_lse also lse [Hq, Tq], as :func:`attention` has them.

    Raises:
        TypeError: an argument is of a type that it cannot have. ValueError: a shape, dtype, device or value does not
        fit.
    """
    _check_tensors(query=query, key=key, value=value, cu_seqlens_q=cu_seqlens_q)
    lengths = _given(kv_lens=kv_lens, cu_seqlens_k=cu_seqlens_k, block_table=block_table)
    if max_seqlen_q is None or (max_seqlen_k is None and block_table is None):
        raise TypeError(f"max_seqlen_{'q' if max_seqlen_q is None else 'k'}: None, wanted an int")
    query = _packed("query", query)
    if block_table is None:
        _check_tensors(cu_seqlens_k=cu_seqlens_k)
        key, value = (_packed(name, x) for name, x in (("key", key), ("value", value)))
    else:
        key, value = (_paged(name, x) for name, x in (("key", key), ("value", value)))
    out, lse = _attend(
        query,
        key,
        value,
        complete(query, options),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=check_int("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=0 if max_seqlen_k is None else check_int("max_seqlen_k", max_seqlen_k),
        **lengths,
    )
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (out, lse) if return_lse else out


@overload
def attention_paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    attn_mask: Tensor | None = None,
    *,
    attn_bias: Tensor | None = None,
    q_lens: Tensor | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attention_paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    attn_mask: Tensor | None = None,
    *,
    attn_bias: Tensor | None = None,
    q_lens: Tensor | None = None,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@entry_point
def attention_paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    attn_mask: Tensor | None = None,
    *,
    attn_bias: Tensor | None = None,
    q_lens: Tensor | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over keys and values that lie in pages. Not differentiable.

    The options are those of :func:`attention`.

    Args:
        query: [B, Hq, Sq, Dqk].
        key_pages: [pages, page_size, Hkv, Dqk], any page size and strides.
        value_pages: [pages, page_size, Hkv, Dv].
        block_table: [B, n], int32 or int64: key j of sequence b is slot ``j % page_size`` of page
            ``block_table[b, j // page_size]``. Entries of pages that no query sees, by kv_lens, kv_starts or the
            window, may hold anything.
        kv_lens: [B], int32 or int64: keys of each sequence.
        attn_mask: broadcastable to [B, Hq, Sq, n * page_size].
        attn_bias: likewise, floating, beside a bool attn_mask.
        q_lens: [B], as in :func:`attention`.
        return_lse: return (out, lse).

    Returns:
        out [B, Hq, Sq, Dv], and with return_lse also lse [B, Hq, Sq], as :func:`attention` has them.

    Raises:
        TypeError: an argument is of a type that it cannot have. ValueError: a shape, dtype, device, length or page does
        not fit.
    """
    _check_tensors(query=query, key_pages=key_pages, value_pages=value_pages, block_table=block_table, kv_lens=kv_lens)
    lengths = _given(q_lens=q_lens)
    masks = _given(attn_mask=attn_mask, attn_bias=attn_bias)
    _warn_of_alignment(query, kv_lens, q_lens, options)
    key, value = _paged("key_pages", key_pages), _paged("value_pages", value_pages)
    if masks:
        masks = _by_kind(query, masks, block_table.size(1) * key_pages.size(1) if block_table.dim() == 2 else None)
    out, lse = _attend(
        query,
        key,
        value,
        complete(query, options),
        block_table=block_table,
        kv_lens=kv_lens,
        **lengths,
        **masks,
    )
    return (out, lse) if return_lse else out


@entry_point
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
    _check_tensors(**{f"outs[{n}]": x for n, x in enumerate(outs)}, **{f"lses[{n}]": x for n, x in enumerate(lses)})
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
    out, lse = ops.merge(outs, lses)
    return (out.squeeze(0).transpose(0, 1), lse.squeeze(0)) if varlen else (out, lse)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], **arguments: Any
) -> tuple[Tensor, Tensor]:
    """(out, lse) of operands in the operator's layout, [batch, heads, rows, dim]."""
    out, lse, _ = ops.attention_exact(query=query, key=key, value=value, **arguments, **options)
    return out, lse


def _packed(name: str, x: Tensor) -> Tensor:
    """[tokens, heads, dim] in the operator's layout."""
    if x.dim() != 3:
        raise ValueError(f"{name}: {x.dim()} dimensions, wanted 3: [tokens, heads, head_dim]")
    return x.transpose(0, 1).unsqueeze(0)


def _paged(name: str, x: Tensor) -> Tensor:
    """[pages, page_size, heads, dim] in the operator's layout."""
    if x.dim() != 4:
        raise ValueError(f"{name}: {x.dim()} dimensions, wanted 4: [pages, page_size, heads, head_dim]")
    return x.transpose(1, 2)


def _states(name: str, states: object) -> list[Tensor]:
    if not isinstance(states, (Tensor, Sequence)) or (isinstance(states, Tensor) and states.dim() == 0):
        raise TypeError(f"{name}: {type(states).__name__}, wanted a sequence of Tensors or a Tensor of states")
    return list(states)


def _causal_bias(masks: dict[str, Any], shape: tuple[int, ...], options: Options) -> tuple[dict[str, Any], Options]:
    """Replaces a CausalBias, whose memory holds nothing, by equivalent options if possible, else by a bool mask."""
    bias = masks["attn_mask"]
    rows, keys = bias.seq_len_q, bias.seq_len_kv
    if (rows, keys) != (shape[2], shape[3]):
        raise ValueError(f"attn_mask: CausalBias of shape {[rows, keys]}, wanted {list(shape[2:])}")
    q_offset = 0 if bias.variant == CausalVariant.UPPER_LEFT else keys - rows
    is_free = not any(options.get(name) for name in ("causal", "window", "q_offset"))
    if is_free and options.get("alibi_slopes") is None:
        others = {name: x for name, x in masks.items() if name != "attn_mask"}
        return others, {**options, "causal": True, "q_offset": q_offset}
    visible = torch.ones(rows, keys, dtype=torch.bool, device=bias.device).tril(q_offset)
    return masks | {"attn_mask": visible}, options


def _by_kind(query: Tensor, masks: dict[str, Any], keys: int | None) -> dict[str, Any]:
    """The operator's arguments, of 4 dimensions: its attn_mask is bool; a float attn_mask is its attn_bias.

    keys: of the scores; None if the shapes do not fit anyway.
    """
    if query.dim() == 4 and keys is not None:
        masks = {name: _broadcastable(name, x, (*query.shape[:3], keys)) for name, x in masks.items()}
    floating = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for name, x in masks.items():
        if x.device != query.device:
            raise ValueError(f"{name}: device {x.device}, wanted that of the other tensors, {query.device}")
        if x.dtype not in floating and not (x.dtype == torch.bool and name == "attn_mask"):
            wanted = "bool or a floating dtype" if name == "attn_mask" else "a floating dtype"
            raise ValueError(f"{name}: dtype {str(x.dtype).removeprefix('torch.')}, wanted {wanted}")
    if "attn_mask" not in masks or masks["attn_mask"].dtype == torch.bool:
        return masks
    if "attn_bias" in masks:
        raise ValueError(
            "attn_bias: given together with a float attn_mask, wanted a bool attn_mask, or their sum as attn_mask"
        )
    return {"attn_bias": masks["attn_mask"]}


def _broadcastable(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A mask or a bias, with 4 dimensions."""
    if _is_placeholder(x):
        raise TypeError(f"{name}: {type(x).__name__}, wanted a Tensor whose memory holds the mask")
    fits = x.dim() <= 4 and all(
        have in (1, want) for have, want in zip(reversed(x.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"{name}: shape {list(x.shape)}, wanted one broadcastable to {list(shape)}")
    return x[(None,) * (4 - x.dim())]


def _warn_of_alignment(query: Tensor, kv_lens: Tensor | None, q_lens: Tensor | None, options: Options) -> None:
    """Warns of a band over fewer keys than queries: its alignment to the last key is seldom meant.

    Only where the lengths can be read at once.
    """
    is_banded = options.get("causal") is True or options.get("window") is not None
    if kv_lens is None or q_lens is not None or options.get("q_offset") is not None or not is_banded:
        return
    is_readable = type(kv_lens) is Tensor and kv_lens.is_cpu and type(query) is Tensor and query.dim() == 4
    if torch.compiler.is_compiling() or not is_readable or torch._C._functorch.is_functorch_wrapped_tensor(kv_lens):
        return
    rows = query.size(2)
    if rows > 1 and ((kv_lens > 0) & (kv_lens < rows)).any():
        warnings.warn(
            "kv_lens: a sequence has fewer keys than queries, and causal and window align its last query with its "
            "last key. If the queries are padded too, pass q_lens; if query 0 is at key 0, pass q_offset=0.",
            stacklevel=4,
        )


def _is_placeholder(x: Tensor) -> bool:
    """Whether x only overrides __torch_function__, so that its memory may not hold what it stands for."""
    function = getattr(type(x).__torch_function__, "__func__", type(x).__torch_function__)
    plain = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]
    return function not in plain and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


def _check_tensors(**arguments: object) -> None:
    for name, x in arguments.items():
        check_tensor(name, x)


def _given(**arguments: object) -> dict[str, Any]:
    """The arguments that are not None, checked."""
    return {name: check_tensor(name, x) for name, x in arguments.items() if x is not None}
