"""FlashAttention 2's functions, with its parameters, on flashsoftmax: on CPUs too, with gradients.

    from flashsoftmax.integrations.flash_attn import flash_attn_func

    from flashsoftmax.integrations import flash_attn
    flash_attn.install()                     # from here on `import flash_attn` finds this module

Query, key and value are [B, S, H, D], or [T, H, D] in varlen. What differs from flash_attn:

- float32 works too and, on the CPU, float64. The head dimension of v may differ; pages may have any size.
- The lse of a row that sees no key is -inf, not +inf. lse is differentiable.
- `s_aux`, the last parameter, is that of FlashAttention 3 for models with attention sinks: [H], one score per head
  of a key whose value is 0.
- `deterministic` is accepted and changes nothing: every run gives the same bits.
- With return_attn_probs the result is (out, lse, S_dmask), and S_dmask is empty, as in flash_attn without dropout.
  With dropout flash_attn returns the weights there; they are not computed here, so that raises NotImplementedError.
- Errors are ValueError, TypeError or NotImplementedError.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import ops
from ..attention import attention, attention_paged, attention_varlen
from . import bert_padding

__version__ = "2.8.3"
"""The release of flash_attn whose functions these are."""

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]

Result: TypeAlias = Tensor | tuple[Tensor, Tensor, Tensor]
Window: TypeAlias = Sequence[int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Result:
    """Attention. Differentiable.

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, Hkv, D]. H is a multiple of Hkv, and query head h reads key head ``h // (H / Hkv)``.
        v: [B, Sk, Hkv, Dv].
        dropout_p: probability that a weight becomes 0.
        softmax_scale: factor of q.k; 1 / sqrt(D) if None.
        causal: hide the keys after the query. The last query is at the position of the last key.
        window_size: (left, right): how many keys before and after its position a query sees; -1 is no bound.
        softcap: c > 0 turns a score s into ``c * tanh(s / c)``.
        alibi_slopes: [H] or [B, H]: adds ``-slope * abs(i + Sk - Sq - j)`` to the score of query i and key j.
        deterministic: accepted; always so.
        return_attn_probs: return (out, lse, an empty tensor).
        s_aux: [H], attention sinks.

    Returns:
        out [B, Sq, H, Dv]; with return_attn_probs also lse [B, H, Sq], float32 (float64 for float64).
    """
    _check_probs(dropout_p, return_attn_probs)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    q_, k_, v_ = (_heads_first(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    out, lse = attention(q_, k_, v_, return_lse=True, **options)
    out = out.transpose(1, 2)
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` of q, k and v in one tensor, qkv [B, S, 3, H, D]."""
    q, k, v = _parts("qkv", qkv, 3, "[B, S, 3, H, D]")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` of k and v in one tensor: q [B, Sq, H, D], kv [B, Sk, 2, Hkv, D]."""
    k, v = _parts("kv", kv, 2, "[B, S, 2, H, D]")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Result:
    """Attention within each of several sequences that follow each other. Differentiable, but not in pages.

    Args:
        q: [Tq, H, D], the rows of all sequences.
        k: [Tk, Hkv, D]; with a block_table, pages [pages, page_size, Hkv, D].
        v: [Tk, Hkv, Dv]; with a block_table, pages [pages, page_size, Hkv, Dv].
        cu_seqlens_q: [sequences + 1], int32 or int64: sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
            The last element is Tq: rows after the last sequence, which flash_attn ignores, are an error.
        cu_seqlens_k: likewise for k and v. With a block_table only the lengths that it implies count.
        max_seqlen_q: at least the length of the longest sequence of queries.
        max_seqlen_k: likewise of keys.
        block_table: [sequences, n], int32 or int64: key j of sequence b is slot ``j % page_size`` of page
            ``block_table[b, j // page_size]``.

    The other parameters are those of :func:`flash_attn_func`.

    Returns:
        out [Tq, H, Dv]; with return_attn_probs (out, lse [H, Tq], an empty tensor).
    """
    _check_probs(dropout_p, return_attn_probs)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    if block_table is None:
        keys: dict[str, Any] = {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_seqlen_k}
    else:
        keys = {"block_table": block_table, "kv_lens": cu_seqlens_k.diff()}
    out, lse = attention_varlen(q, k, v, cu_seqlens_q, max_seqlen_q=max_seqlen_q, return_lse=True, **keys, **options)
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` of q, k and v in one tensor, qkv [T, 3, H, D]."""
    q, k, v = _parts("qkv", qkv, 3, "[T, 3, H, D]")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` of k and v in one tensor: q [Tq, H, D], kv [Tk, 2, Hkv, D]."""
    k, v = _parts("kv", kv, 2, "[T, 2, H, D]")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends k and v to a cache, in place, and attends to all of it. Not differentiable.

    On a CPU nothing is written if a length or a page is impossible. Messages then call cache_seqlens kv_lens, with or
    without the new keys, and speak of an entry of cache_batch_idx as of a page. On a GPU the host does not read lengths
    and pages: rows without a place in the cache are not written, and sequences with impossible lengths get NaN.

    Args:
        q: [B, Sq, H, D].
        k_cache: [B, Sk, Hkv, D], or [caches, Sk, Hkv, D] with cache_batch_idx. With a block_table, pages
            [pages, page_size, Hkv, D] of any size.
        v_cache: likewise, with Dv for D.
        k: [B, Sn, Hkv, D]: new keys, written to the cache from position cache_seqlens on. cache_seqlens itself is not
            changed.
        v: [B, Sn, Hkv, Dv], new values.
        rotary_cos: [positions, r / 2] with r <= D, in the dtype of q or float32: rotates the first r elements of the
            rows of k, at the positions cache_seqlens, cache_seqlens + 1, ..., and of q, at the same positions if causal
            or with a window, else all at position cache_seqlens. Needs k and v.
        rotary_sin: likewise.
        cache_seqlens: an int or [B], int32 or int64: how many keys the cache holds, without the new ones; all if None.
        cache_batch_idx: [B]: the entry of the cache that belongs to each sequence. They should be distinct if k is
            given: of two rows for one place either may be written.
        cache_leftpad: [B]: where the keys of a sequence start; the keys before are hidden. Positions do not change.
            Works with pages too.
        block_table: [B, n], int32 or int64: key j of sequence b is slot ``j % page_size`` of page
            ``block_table[b, j // page_size]``.
        rotary_interleaved: rotate elements 0 and 1, 2 and 3, ...; if False, 0 and r / 2, 1 and r / 2 + 1, ...
        num_splits: over how many splits the keys are distributed; 0 chooses by itself. The bits of the result depend on
            it.
        return_softmax_lse: return (out, lse).

    The other parameters are those of :func:`flash_attn_func`.

    Returns:
        out [B, Sq, H, Dv], or (out, lse [B, H, Sq]).
    """
    options = _options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    query = _heads_first("q", q)
    key_cache, value_cache = _heads_first("k_cache", k_cache), _heads_first("v_cache", v_cache)
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("cache_batch_idx: given together with block_table, wanted one of them")
    table = block_table if cache_batch_idx is None else cache_batch_idx.unsqueeze(1)
    capacity = k_cache.size(1) * (1 if table is None else table.size(1))
    lens = _lengths(q, cache_seqlens, None if k is not None else capacity)
    options["kv_starts"] = cache_leftpad
    if num_splits > 0:
        options["split_size"] = max(1, -(-capacity // num_splits))

    if k is not None and v is not None:
        kv_lens, is_banded = lens + k.size(1), causal or options["window"] is not None
        is_checked = table is not None or cache_leftpad is not None  # by attention; append_kv checks lengths itself
        if is_checked and q.is_cpu and not torch.compiler.is_compiling():
            _check_before_append(query, k_cache, v_cache, table, kv_lens, options)
        new = _heads_first("k", k), _heads_first("v", v)
        tables: dict[str, Any] = {
            "rotary_cos": rotary_cos,
            "rotary_sin": rotary_sin,
            "rotary_interleaved": rotary_interleaved,
        }
        rotated = query
        if rotary_cos is not None and rotary_sin is not None:
            rotated = ops.rotary(query, **tables, positions=lens, same_position=not is_banded)
        ops.append_kv(key_cache, value_cache, *new, kv_lens=lens, block_table=table, **tables)
        query, lens = rotated, kv_lens
    elif k is not None or v is not None:
        raise ValueError(f"{'v' if k is not None else 'k'}: None, wanted k and v together")
    elif rotary_cos is not None or rotary_sin is not None:
        raise ValueError("rotary_cos, rotary_sin: given without k and v, wanted with them")

    out, lse = _attend(query, k_cache, v_cache, table, lens, options)
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None,
) -> dict[str, Any]:
    """The options of flashsoftmax.attention."""
    if len(window_size) != 2:
        raise ValueError(f"window_size: {len(window_size)} elements, wanted (left, right)")
    left, right = (None if bound < 0 else int(bound) for bound in window_size)
    dropout = {"dropout_p": dropout_p} if dropout_p > 0 else {}
    return dropout | {
        "scale": softmax_scale,
        "causal": bool(causal),
        "window": None if left is None and right is None else (left, right),
        "softcap": softcap if softcap > 0 else None,
        "alibi_slopes": alibi_slopes,
        "sinks": s_aux,
    }


def _check_probs(dropout_p: float, return_attn_probs: bool) -> None:
    if return_attn_probs and dropout_p > 0:
        raise NotImplementedError(
            "return_attn_probs: True with dropout, wanted False: S_dmask, the matrix of weights, is never computed"
        )


def _heads_first(name: str, x: Tensor) -> Tensor:
    """[B, S, H, D] as [B, H, S, D]"""
    if x.dim() != 4:
        raise ValueError(f"{name}: {x.dim()} dimensions, wanted 4: [batch, tokens, heads, head_dim]")
    return x.transpose(1, 2)


def _parts(name: str, x: Tensor, count: int, layout: str) -> tuple[Tensor, ...]:
    """q, k and v, or k and v, of a packed tensor."""
    if x.dim() != layout.count(",") + 1 or x.size(-3) != count:
        raise ValueError(f"{name}: shape {list(x.shape)}, wanted {layout}")
    return x.unbind(-3)


def _lengths(q: Tensor, cache_seqlens: int | Tensor | None, otherwise: int | None) -> Tensor:
    """cache_seqlens as a tensor [B]."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    length = otherwise if cache_seqlens is None else cache_seqlens
    if length is None:
        raise ValueError("cache_seqlens: None, wanted with k and v")
    return torch.full((q.size(0),), length, dtype=torch.int64, device=q.device)


def _attend(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor | None, kv_lens: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(out, lse) of query [B, H, S, D] on a cache: contiguous, or pages if there is a table."""
    if table is not None:
        return attention_paged(query, k_cache, v_cache, table, kv_lens, return_lse=True, **options)
    key, value = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    return attention(query, key, value, kv_lens=kv_lens, return_lse=True, **options)


def _check_before_append(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor | None, kv_lens: Tensor, options: dict[str, Any]
) -> None:
    """Raises what the attention after an append would raise, so that the cache is not written then.

    It is that call without heads: the operator checks lengths, pages and options, and computes nothing.
    """
    heads = {name: x[..., :0] for name in ("alibi_slopes", "sinks") if isinstance(x := options[name], Tensor)}
    _attend(query[:, :0], k_cache, v_cache, table, kv_lens, options | heads)


class _Distribution(importlib.metadata.Distribution):
    """The record of an installed flash_attn, for programs that ask importlib.metadata for its version."""

    def read_text(self, filename: str) -> str | None:
        files = {"METADATA": f"Name: flash-attn\nVersion: {__version__}\n", "top_level.txt": "flash_attn\n"}
        return files.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Finder(importlib.metadata.DistributionFinder):
    def find_spec(self, *args: Any) -> None:
        """Modules are found in sys.modules."""

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        is_meant = name is None or name.lower().replace("-", "_") == "flash_attn"
        return [_Distribution()] if is_meant else []


_finder = _Finder()
_replaced: dict[str, ModuleType] | None = None  # the modules that install() took out of sys.modules


def _named(name: str) -> dict[str, ModuleType]:
    return {key: module for key, module in sys.modules.items() if key == name or key.startswith(f"{name}.")}


def install() -> None:
    """Puts these functions in place of the package flash_attn, so that programs that import it use them.

    There are flash_attn, flash_attn.flash_attn_interface and flash_attn.bert_padding, and a version for those who ask.
    Call it before such a program is imported: names that were imported from flash_attn earlier stay what they are.
    """
    global _replaced
    if _replaced is not None:
        return
    _replaced = _named("flash_attn")
    for name in _replaced:
        del sys.modules[name]
    functions = {name: globals()[name] for name in __all__ if name.startswith("flash_attn_")}
    padding = {
        name: x for name, x in vars(bert_padding).items() if getattr(x, "__module__", "") == bert_padding.__name__
    }
    package = _module("flash_attn", functions | {"__version__": __version__, "__path__": []})
    for name, members in (("flash_attn_interface", functions), ("bert_padding", padding)):
        setattr(package, name, _module(f"flash_attn.{name}", members))
    sys.meta_path.insert(0, _finder)


def _module(name: str, members: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, __doc__)
    module.__spec__ = ModuleSpec(name, None, is_package="__path__" in members)
    vars(module).update(members)
    sys.modules[name] = module
    return module


def uninstall() -> None:
    """Takes :func:`install` back."""
    global _replaced
    if _replaced is None:
        return
    for name in _named("flash_attn"):
        del sys.modules[name]
    sys.modules.update(_replaced)
    sys.meta_path.remove(_finder)
    _replaced = None
