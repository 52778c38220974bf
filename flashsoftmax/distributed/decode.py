"""Decode over a cache whose tokens are spread over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from .. import ops
from ..options import SCORE_NAMES, ScoreOptions, complete, entry_point
from .plan import agree, process_group
from .states import merge_exact


@overload
def decode_over_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    kv_lens: Tensor,
    interleave: int = 1,
    block_table: Tensor | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[ScoreOptions],
) -> Tensor: ...
@overload
def decode_over_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    kv_lens: Tensor,
    interleave: int = 1,
    block_table: Tensor | None = None,
    return_lse: Literal[True],
    **options: Unpack[ScoreOptions],
) -> tuple[Tensor, Tensor]: ...
@partial(entry_point, options=ScoreOptions)
def decode_over_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    kv_lens: Tensor,
    interleave: int = 1,
    block_table: Tensor | None = None,
    return_lse: bool = False,
    **options: Unpack[ScoreOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the same queries on all ranks over a cache of which each rank holds some tokens.

    Each rank attends over its own tokens, and the partial results are gathered and merged, so every rank returns the
    whole result, with the same bits. For inference: not differentiable.

    Args:
        query: [B, Hq, Sq, Dqk], the same on all ranks.
        key: this rank's part of the cache, [B, Hkv, slots, Dqk]. Token i of a sequence is on rank
            ``(i // interleave) % n``, in the order of the tokens: slot ``i // (n * interleave) * interleave +
            i % interleave``. With block_table pages [pages, page_size, Hkv, Dqk].
        value: likewise, with its own Dv.
        group: a process group or a mesh of one dimension; the default group if omitted.
        kv_lens: [B], int32 or int64: the tokens of each sequence on all ranks together.
        interleave: how many consecutive tokens are on one rank. With interleave = slots each rank has one contiguous
            part of the cache.
        block_table: [B, n], for pages: slot s of sequence b is slot ``s % page_size`` of page
            ``block_table[b, s // page_size]``.
        causal, window, scale, softcap, alibi_slopes, sinks: as in attention; the last query is at the last of the
            kv_lens tokens. Sinks count once.
        return_lse: return (out, lse).

    Returns:
        out [B, Hq, Sq, Dv], and with return_lse also lse [B, Hq, Sq], as attention has them, on every rank.

    Raises:
        TypeError, ValueError: an argument does not fit, or requires a gradient. On CPUs all ranks raise.
    """
    group, shape = process_group(group)
    ranks, rank = (1, 0) if group is None else (group.size(), dist.get_rank(group))
    found: tuple[Tensor, Tensor, Tensor] | None = None
    signature, problem = "", None
    try:
        _check(query, key, value, kv_lens, interleave, block_table, options.get("sinks"), shape)
        arguments = {"kv_lens": kv_lens, "block_table": block_table, **complete(query, options, SCORE_NAMES)}
        arguments |= {"query": query, "key": key, "value": value}
        if block_table is not None:
            arguments |= {"key": key.transpose(1, 2), "value": value.transpose(1, 2)}
        if ranks > 1:
            arguments |= _local(arguments, ranks, rank, interleave)
        with torch.no_grad():
            found = ops.attention_exact(**arguments)
        signature = f"query {list(query.shape)}, {query.dtype} on {query.device.type}, interleave {interleave}"
    except (TypeError, ValueError) as error:
        problem = error
    if problem is not None or (query.device.type == "cpu" and not torch.compiler.is_compiling()):
        agree(group, "decode_over_ranks", signature, problem, query.device if isinstance(query, Tensor) else None)
    assert found is not None
    out, lse, lse_error = found
    if group is not None:
        outs, lses = _gathered(out, group), _gathered(lse.double() + lse_error.double(), group)
        out, lse, _ = merge_exact(outs, lses)
    return (out, lse) if return_lse else out


def local_lens(kv_lens: Tensor, ranks: int, rank: int, interleave: int) -> Tensor:
    """[B]: how many of the first kv_lens tokens are on a rank."""
    rounds = kv_lens // (ranks * interleave)
    rest = kv_lens - rounds * (ranks * interleave) - rank * interleave
    return rounds * interleave + rest.clamp(0, interleave)


def _local(arguments: dict[str, Any], ranks: int, rank: int, interleave: int) -> dict[str, Any]:
    """The arguments that are others for the tokens of one rank, if there are several.

    These tokens are not consecutive: where a score or what a query sees depends on positions, a mask says so.
    """
    query, key, kv_lens, slopes = (arguments[name] for name in ("query", "key", "kv_lens", "alibi_slopes"))
    left, right, table = (arguments[name] for name in ("window_left", "window_right", "block_table"))
    sinks = arguments["sinks"] if rank == 0 else None  # they count once
    local = {"kv_lens": local_lens(kv_lens, ranks, rank, interleave), "sinks": sinks}
    rows = query.size(2)
    sees_all = left is None and (right is None or rows == 1)
    if sees_all and slopes is None:
        return local | {"window_right": None}
    slots = torch.arange(key.size(2) * (1 if table is None else table.size(1)), device=query.device)
    tokens = slots // interleave * (interleave * ranks) + rank * interleave + slots % interleave
    positions = kv_lens[:, None] - rows + torch.arange(rows, device=query.device)
    behind = positions[:, :, None] - tokens  # [B, rows, slots]
    visible = torch.ones_like(behind, dtype=torch.bool)
    if left is not None:
        visible &= behind <= left
    if right is not None:
        visible &= behind >= -right
    local |= {"attn_mask": visible[:, None], "alibi_slopes": None, "window_left": None, "window_right": None}
    if slopes is not None:
        local["attn_bias"] = -slopes[..., None, None] * behind[:, None].abs()
    return local


def _gathered(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """x of each rank."""
    gathered = functional.all_gather_tensor(x.contiguous(), 0, group)
    return list(functional.wait_tensor(gathered).view(group.size(), *x.shape).unbind())


def _check(
    query: Any, key: Any, value: Any, kv_lens: Any, interleave: Any, block_table: Any, sinks: Any, mesh: Any
) -> None:
    tensors = {"query": query, "key": key, "value": value, "kv_lens": kv_lens}
    if block_table is not None:
        tensors["block_table"] = block_table
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: {type(x).__name__}, wanted a Tensor")
    for name, x in {"query": query, "key": key, "value": value}.items():
        if x.dim() != 4:
            raise ValueError(f"{name}: {x.dim()} dimensions, wanted 4")
    for name, x in {"query": query, "key": key, "value": value, "sinks": sinks}.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: requires_grad is True, wanted False (or no_grad): decode has no gradient")
    if kv_lens.dim() != 1 or kv_lens.size(0) != query.size(0) or kv_lens.dtype not in (torch.int32, torch.int64):
        found = f"shape {list(kv_lens.shape)} of {kv_lens.dtype}"
        raise ValueError(f"kv_lens: {found}, wanted [{query.size(0)}] of int32 or int64")
    if not isinstance(interleave, int) or isinstance(interleave, bool):
        raise TypeError(f"interleave: {type(interleave).__name__}, wanted an int")
    if interleave < 1:
        raise ValueError(f"interleave: {interleave}, wanted at least 1")
    if mesh is not None and len(mesh) > 1:
        raise ValueError(f"group: a mesh of {len(mesh)} dimensions, wanted 1")
