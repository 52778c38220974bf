"""Ours and every peer, all called alike: query [batch, heads, queries, dim], and the last query sees the last key."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashsoftmax import attention

from . import cpu_peers
from .shapes import Inputs, Shape
from .timing import Timed

OURS = "flashsoftmax"
DEFAULT = "torch"
"""torch's scaled_dot_product_attention with the backend that it chooses; on a CPU that is its flash attention."""

Attend = Callable[[Tensor, Tensor, Tensor, Shape], Tensor]


def ours(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    if shape.as_mask:
        return attention(query, key, value, shape.mask(query.device))
    window = None if shape.window is None else (shape.window, None)
    kv_lens = None if shape.filled is None else torch.full((shape.batch,), shape.filled, device=query.device)
    return attention(query, key, value, causal=shape.causal, window=window, kv_lens=kv_lens)


def sdpa(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    gqa = shape.group > 1
    if shape.shown in ("", "causal") and (shape.queries == shape.keys or not shape.causal):
        return scaled_dot_product_attention(query, key, value, is_causal=shape.causal, enable_gqa=gqa)
    mask = shape.mask(query.device)
    return scaled_dot_product_attention(query, key, value, mask, enable_gqa=gqa)


def naive(query: Tensor, key: Tensor, value: Tensor, shape: Shape, rows: Tensor | None = None) -> Tensor:
    """Attention that writes the score matrix. `rows`: which of the shape's queries `query` holds; all if None."""
    rows = torch.arange(shape.queries, device=query.device) if rows is None else rows
    grouped = query.unflatten(1, (-1, shape.group)).flatten(2, 3)
    scores = grouped @ key.mT * shape.dim**-0.5
    hidden = shape.hidden(rows)
    if hidden is not None:
        scores = scores.masked_fill(hidden.repeat(shape.group, 1), -torch.inf)
    out: Tensor = scores.softmax(-1) @ value
    return out.view_as(query)


def flash_attn(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """flash_attn takes and returns [batch, rows, heads, dim]."""
    from flash_attn import flash_attn_func, flash_attn_with_kvcache  # type: ignore[import-not-found]

    if shape.shown not in ("", "causal"):
        raise NotImplementedError("the benchmark calls flash_attn without a window or a mask only")
    call = flash_attn_with_kvcache if shape.kind == "decode" else flash_attn_func
    out: Tensor = call(*(x.transpose(1, 2) for x in (query, key, value)), causal=shape.causal)
    return out.transpose(1, 2)


def flashinfer(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """flashinfer takes one sequence: query [rows, heads, dim], to decode [heads, dim], HND key [heads, keys, dim]."""
    from flashinfer import (  # type: ignore[import-not-found]
        single_decode_with_kv_cache,
        single_prefill_with_kv_cache,
    )

    if shape.batch > 1 or shape.kind == "forward + backward" or shape.shown not in ("", "causal"):
        raise NotImplementedError(
            "the benchmark calls flashinfer for a forward of one sequence without a window or a mask only"
        )
    if shape.queries == 1:
        out: Tensor = single_decode_with_kv_cache(query[0, :, 0], key[0], value[0], kv_layout="HND")
        return out[None, :, None]
    rows = query[0].transpose(0, 1).contiguous()
    out = single_prefill_with_kv_cache(rows, key[0], value[0], causal=shape.causal, kv_layout="HND")
    return out.transpose(0, 1)[None]


@dataclass(frozen=True)
class Peer:
    attend: Attend
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    writes: Callable[[Shape], int] = lambda shape: 0
    """Upper bound of the bytes that it writes beside its output."""


def peers(device: str) -> dict[str, Peer]:
    unfused = {
        "torch math": Peer(sdpa, partial(sdpa_kernel, SDPBackend.MATH), lambda x: x.score_bytes + x.repeated_bytes),
        "naive": Peer(naive, writes=lambda x: x.score_bytes),
    }
    if device == "cpu":
        return {DEFAULT: Peer(sdpa), **unfused, **{name: Peer(attend) for name, attend in cpu_peers.PEERS.items()}}
    return {
        DEFAULT: Peer(sdpa),
        "torch flash": Peer(sdpa, partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)),
        "torch cudnn": Peer(sdpa, partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)),
        "torch efficient": Peer(sdpa, partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION)),
        **unfused,
        "flash_attn": Peer(flash_attn),
        "flashinfer": Peer(flashinfer),
    }


def results(attend: Attend, inputs: Inputs, shape: Shape) -> tuple[Tensor, ...]:
    """The output, and the gradients if the shape asks for them."""
    query, key, value, grad = inputs
    out = attend(query, key, value, shape)
    if shape.kind != "forward + backward":
        return (out,)
    return (out, *torch.autograd.grad(out, (query, key, value), grad))


def comfortable_bytes(device: str) -> int:
    """How much a peer may write."""
    return torch.cuda.get_device_properties(0).total_memory // 8 if device == "cuda" else 2**30


def obstacle(name: str, peer: Peer, timed: Timed, shape: Shape, device: str) -> str | None:
    """Why a peer cannot be timed; None if it can."""
    if name in ("flash_attn", "flashinfer", *cpu_peers.PEERS) and find_spec(name) is None:
        return "not installed"
    if peer.writes(shape) > comfortable_bytes(device):
        return "it would write too much"
    try:
        with warnings.catch_warnings(), timed.within():
            warnings.simplefilter("ignore")  # torch warns about each reason against a backend
            timed.call()
    except Exception as error:  # peers refuse with all kinds of exceptions, asserts among them
        return str(error).partition("\n")[0] or type(error).__name__
    return None


def contenders(shape: Shape, inputs: Inputs, device: str) -> tuple[dict[str, Timed], dict[str, str]]:
    """The contenders that can be timed, ours first, and the reason for each that cannot."""
    timed = {OURS: Timed(partial(results, ours, inputs, shape))}
    missing: dict[str, str] = {}
    for name, peer in peers(device).items():
        candidate = Timed(partial(results, peer.attend, inputs, shape), peer.within)
        reason = obstacle(name, peer, candidate, shape, device)
        if reason is None:
            timed[name] = candidate
        else:
            missing[name] = reason
    return timed, missing
