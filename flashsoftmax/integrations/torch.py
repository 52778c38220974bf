"""flashsoftmax as the kernels of torch's own attention: scaled_dot_product_attention and varlen_attn.

    import flashsoftmax.integrations.torch as integration

    integration.enable()               # or: with integration.enabled(): ...

or by torch's registry, once this module is imported:

    torch.nn.attention.activate_flash_attention_impl("flashsoftmax")

From then on these calls, and all that is built on them (``nn.MultiheadAttention``, ``nn.TransformerEncoder``, compiled
graphs), run flashsoftmax's kernels:

- On a CPU, ``scaled_dot_product_attention`` wherever torch takes its own flash kernel. It takes another way for
  dropout, a mask that requires a gradient, a value of another head_dim, a last dimension with gaps, and empty tensors.
- On CUDA, ``scaled_dot_product_attention`` wherever torch selects its flash backend.
- ``torch.nn.attention.varlen.varlen_attn`` and ``varlen_attn_out`` on CUDA and, unlike with torch alone, on a CPU: with
  float32 too, and with gradients.

Results have the strides of torch's own kernels, and the kernels write them there directly. Calls that flashsoftmax does
not take go to torch's own kernel: :func:`fallbacks` counts them, and the first of each kind is logged. A forward with
flashsoftmax may be followed by a backward without it, and the other way round. The backward gets lse as torch keeps it,
rounded, so where lse is large, gradients are less accurate than those of ``flashsoftmax.attention``.

Causal masks keep the meaning that each operator has in torch: ``scaled_dot_product_attention`` aligns the first query
with the first key, ``varlen_attn`` the last query with the last key.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention as registry

from .. import build
from ..fake import MAX_HEAD_DIM
from ..library import OPERATORS, listed, statistics
from ..options import default_scale

__all__ = ["NAME", "disable", "enable", "enabled", "fallbacks"]

NAME = "flashsoftmax"
"""The name in torch's registry of flash attention implementations."""

_log = logging.getLogger(__name__)
_fallbacks: Counter[str] = Counter()


def enable() -> None:
    """Makes flashsoftmax the implementation of torch's flash attention, in place of any other."""
    if registry.current_flash_attention_impl() != NAME:
        registry.activate_flash_attention_impl(NAME)


def disable() -> None:
    """Gives torch its own kernels back. Does nothing if flashsoftmax is not enabled."""
    if registry.current_flash_attention_impl() == NAME:
        registry.restore_flash_attention_impl()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Enables flashsoftmax for a block of code; afterwards the implementation from before is active again.

    The implementation is that of the process: it is enabled for other threads too.
    """
    before = registry.current_flash_attention_impl()
    enable()
    try:
        yield
    finally:
        if before != NAME:
            disable()
        if before not in (None, NAME):
            registry.activate_flash_attention_impl(before)


def fallbacks() -> dict[str, int]:
    """How many calls went to torch's own kernels since the import, by operator and reason."""
    return dict(_fallbacks)


def _run(operator: str, **arguments: Any) -> Any:
    """Calls an operator of flashsoftmax. Omitted arguments are None, or 0 if None is not allowed."""
    return OPERATORS[operator](*listed(operator, arguments))


def _scale(query: Tensor, scale: float | None) -> float:
    return default_scale(query) if scale is None else scale


def _masks(attn_mask: Tensor | None) -> dict[str, Tensor]:
    """The operator's argument for a mask of 2 to 4 dimensions."""
    if attn_mask is None:
        return {}
    name = "attn_mask" if attn_mask.dtype == torch.bool else "attn_bias"
    return {name: attn_mask[(None,) * (4 - attn_mask.dim())]}


def _auxiliary(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's kernels return for dropout: a state of the random numbers, an unused tensor, and no weights."""
    state, unused = (torch.zeros(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
    return state, unused, query.new_empty(0)


# scaled_dot_product_attention on the CPU: [B, H, S, D], the first query is aligned with the first key


def _top_left(is_causal: bool) -> dict[str, int]:
    return {"window_right": 0, "q_offset": 0} if is_causal else {}


def _sdpa_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(query)
    batch, heads, rows, _ = query.shape
    lse = query.new_empty((batch, rows, heads), dtype=statistics(query.dtype)).transpose(1, 2)
    operands = {"query": query, "key": key, "value": value, "out": out, "lse": lse}
    _run("attention_out", **operands, **_masks(attn_mask), **_top_left(is_causal), scale=_scale(query, scale))
    if attn_mask is not None:
        lse.masked_fill_(lse == -math.inf, 0)  # as in torch, whose backward would make NaN of -inf
    return out, lse


def _sdpa_cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    operands = {"grad_out": grad_out, "query": query, "key": key, "value": value, "out": out, "lse": logsumexp}
    rows_first = [
        torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype, device=x.device) for x in (query, key, value)
    ]
    options = {**_masks(attn_mask), **_top_left(is_causal), "scale": _scale(query, scale)}
    return _backward(rows_first, rows_first, operands, options)


def _backward(
    grads: list[Tensor], views: list[Tensor], operands: dict[str, Tensor], options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Writes the gradients of query, key and value into `views` of `grads`, which have the operator's layout."""
    grad_names = ("grad_query", "grad_key", "grad_value")
    _run("attention_backward_out", **dict(zip(grad_names, views, strict=True)), **operands, **options)
    return tuple(grads)


# scaled_dot_product_attention on CUDA: [B, H, S, D]. Torch calls this operator for as many queries as keys, and for
# CausalBias of the variant LOWER_RIGHT: the last query is aligned with the last key.


def _sdpa_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    operands = {"query": query, "key": key, "value": value, "out": out, "lse": lse}
    _run("attention_out", **operands, window_right=0 if is_causal else None, scale=_scale(query, scale))
    return out, lse, None, None, query.size(2), key.size(2), *_auxiliary(query)


def _sdpa_cuda_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    operands = {"grad_out": grad_out, "query": query, "key": key, "value": value, "out": out, "lse": logsumexp}
    grads = [torch.empty_like(x) for x in (query, key, value)]
    options = {"window_right": 0 if is_causal else None, "scale": _scale(query, scale)}
    return _backward(grads, grads, operands, options)


# varlen_attn: [T, H, D] with cum_seq_q, or [B, S, H, D] without; the last query is aligned with the last key


def _heads_first(x: Tensor) -> Tensor:
    """[T, H, D], [B, S, H, D] or [pages, page_size, H, D] in the operator's layout, as a view."""
    return x.transpose(0, 1).unsqueeze(0) if x.dim() == 3 else x.transpose(1, 2)


def _sequences(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int) -> dict[str, Any]:
    if cum_seq_q is None:
        return {}
    return {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}


def _window(is_causal: bool, left: int | None, right: int | None) -> dict[str, int | None]:
    """In torch -1 is no bound."""
    left, right = (None if bound is None or bound < 0 else bound for bound in (left, right))
    return {"window_left": left, "window_right": 0 if is_causal else right}


def _flash_inplace(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Writes out and returns lse, [H, T] or [B, H, S]. num_splits asks for bits that no other sequence changes: ours
    never depend on the others."""
    if block_table is not None:
        seqused_k = cum_seq_k.diff() if seqused_k is None and cum_seq_k is not None else seqused_k
        cum_seq_k = None
    operands = {name: _heads_first(x) for name, x in (("out", out), ("query", query), ("key", key), ("value", value))}
    lse = query.new_empty(operands["query"].shape[:3], dtype=torch.float32)
    _run(
        "attention_out",
        **operands,
        **_sequences(cum_seq_q, cum_seq_k, max_q, max_k),
        **_window(is_causal, window_size_left, window_size_right),
        lse=lse,
        kv_lens=seqused_k,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        scale=_scale(query, scale),
    )
    return lse if cum_seq_q is None else lse.squeeze(0)


def _flash(query: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
    out = torch.empty_like(query)
    return out, _flash_inplace(out, query, *args, **options), *_auxiliary(query)


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    given = {"grad_out": grad_out, "query": query, "key": key, "value": value, "out": out}
    operands = {name: _heads_first(x) for name, x in given.items()}
    operands["lse"] = logsumexp if cum_seq_q is None else logsumexp.unsqueeze(0)
    grads = [torch.empty_like(x) for x in (query, key, value)]
    options = {
        **_sequences(cum_seq_q, cum_seq_k, max_q, max_k),
        **_window(is_causal, window_size_left, window_size_right),
        "scale": _scale(query, scale),
    }
    return _backward(grads, [_heads_first(x) for x in grads], operands, options)


_SDPA = "_scaled_dot_product_flash_attention"
_VARLEN: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": _flash,
    "_flash_attention_forward_no_dropout_inplace": _flash_inplace,
    "_flash_attention_backward": _flash_backward,
}
_IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "CPU": {f"{_SDPA}_for_cpu": _sdpa_cpu, f"{_SDPA}_for_cpu_backward": _sdpa_cpu_backward, **_VARLEN},
    "CUDA": {_SDPA: _sdpa_cuda, f"{_SDPA}_backward": _sdpa_cuda_backward, **_VARLEN},
}
"""What this module implements of aten, by dispatch key and operator."""


def _unsupported(operator: str, device: str, values: dict[str, Any]) -> str | None:
    """Why torch's own kernel runs instead, or None."""
    query, key, value = values["query"], values["key"], values["value"]
    if values.get("dropout_p", 0.0) != 0:
        return "dropout_p is not 0"
    if values.get("return_debug_mask"):
        return "return_debug_mask is True"
    if operator not in _VARLEN and query.dim() != 4:
        return "query does not have 4 dimensions"
    if query.dtype == torch.float64 and (device == "CUDA" or operator in _VARLEN):
        return "the dtype is float64"
    if max(x.size(-1) for x in (query, key, value)) > MAX_HEAD_DIM:
        return f"head_dim is over {MAX_HEAD_DIM}"
    if query.size(-1) != value.size(-1):
        return "the head_dim of value is not that of query"
    return None


def _kernel(operator: str, device: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, or torch's own kernel for what flashsoftmax does not take."""
    name = f"aten::{operator}"
    arguments = [x.name for x in getattr(torch.ops.aten, operator).default._schema.arguments]
    exists = torch._C._dispatch_has_kernel_for_dispatch_key(name, device)
    own = torch.library.get_kernel(name, device) if exists else None
    not_built = build.cuda_reason() if device == "CUDA" else None

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        values = dict(zip(arguments, args, strict=False)) | kwargs
        reason = not_built or _unsupported(operator, device, values)
        if reason is None:
            return function(*args, **kwargs)
        if own is None:
            raise NotImplementedError(f"{operator}: {reason}, and torch has no kernel of its own on this device")
        what = f"{operator}: {reason}"
        _fallbacks[what] += 1
        if _fallbacks[what] == 1:
            _log.warning("%s; torch's own kernel runs instead", what)
        return own.call_boxed(keys, *args, **kwargs)

    return kernel


class _Registration:
    """The kernels in torch's dispatcher, until remove()."""

    def __init__(self) -> None:
        kernels = [
            (operator, _kernel(operator, device, function), device)
            for device, functions in _IMPLEMENTATIONS.items()
            for operator, function in functions.items()
        ]
        self._library = torch.library.Library("aten", "IMPL")
        for kernel in kernels:
            self._library.impl(*kernel, with_keyset=True)

    def remove(self) -> None:
        self._library._destroy()


if not hasattr(registry, "restore_flash_attention_impl"):
    raise ImportError(
        f"flashsoftmax.integrations.torch: torch {torch.__version__} has no restore_flash_attention_impl in "
        "torch.nn.attention, wanted a later torch"
    )
registry.register_flash_attention_impl(NAME, register_fn=_Registration)
