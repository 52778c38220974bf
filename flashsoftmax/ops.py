"""torch.ops.flashsoftmax: loads the libraries and tells PyTorch how their operators trace, differentiate and batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import build

NAMES = ("attention", "attention_backward", "merge", "merge_backward")


def _load() -> None:
    core = os.environ.get("FLASHSOFTMAX_LIBRARY") or build.library("_C")
    torch.ops.load_library(str(core))
    if build.cuda_reason() is None:
        torch.ops.load_library(str(build.library("_CUDA")))


_load()


def attention(*args: Any) -> tuple[Tensor, Tensor]:
    return torch.ops.flashsoftmax.attention.default(*args)  # type: ignore[no-any-return]


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.ops.flashsoftmax.merge.default(outs, lses)  # type: ignore[no-any-return]


# A device that has no kernel says why.


def _missing_on_cuda(name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        reason = build.cuda_reason() or "it is not written yet"
        raise NotImplementedError(f"flashsoftmax::{name} has no CUDA kernel: {reason}")

    return kernel


for _name in NAMES:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"flashsoftmax::{_name}", "CUDA"):
        torch.library.impl(f"flashsoftmax::{_name}", "CUDA")(_missing_on_cuda(_name))


# Shapes and strides, for tracing. Values are checked when the operator runs.


def _empty_like_layout(like: Tensor, dims: int) -> Tensor:
    batch, heads, rows, _ = like.shape
    if heads > 1 and rows > 1 and like.stride(1) < like.stride(2):
        return like.new_empty((batch, rows, heads, dims)).transpose(1, 2)
    return like.new_empty((batch, heads, rows, dims))


def _statistics(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check_devices(*tensors: Tensor | None) -> None:
    devices = {x.device for x in tensors if isinstance(x, Tensor)}
    if len(devices) > 1:
        raise ValueError(f"tensors on {' and '.join(sorted(map(str, devices)))}, wanted all on one device")


@torch.library.register_fake("flashsoftmax::attention")
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _check_devices(query, key, value, *rest)
    return _empty_like_layout(query, value.size(3)), query.new_empty(query.shape[:3], dtype=_statistics(query))


@torch.library.register_fake("flashsoftmax::attention_backward")
def _(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    mask_grad = rest[-1]
    return (
        *(_empty_like_layout(x, x.size(3)) for x in (query, key, value)),
        lse.new_empty(attn_mask.shape if mask_grad and attn_mask is not None else (0,)),
        lse.new_empty(sinks.shape if sinks is not None else (0,)),
    )


@torch.library.register_fake("flashsoftmax::merge")
def _(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    _check_devices(*outs, *lses)
    return _empty_like_layout(outs[0], outs[0].size(3)), lses[0].new_empty(lses[0].shape)


@torch.library.register_fake("flashsoftmax::merge_backward")
def _(
    grad_out: Tensor | None, grad_lse: Tensor | None, outs: list[Tensor], lses: list[Tensor], lse: Tensor
) -> tuple[Tensor, Tensor]:
    return outs[0].new_empty((len(outs), *outs[0].shape)), lse.new_empty((len(outs), *lse.shape))


# Autograd. Arguments are passed by position, so that ctx.needs_input_grad covers all of them.


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    (
        query,
        key,
        value,
        attn_mask,
        alibi_slopes,
        sinks,
        kv_lens,
        cu_seqlens_q,
        cu_seqlens_k,
        block_table,
        *options,
    ) = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        query, key, value, *output, attn_mask, alibi_slopes, sinks, kv_lens, cu_seqlens_q, cu_seqlens_k
    )
    ctx.options = options[:-1]  # split_size is of the forward only
    ctx.paged = block_table is not None


def _attention_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    inputs = len(ctx.needs_input_grad)
    if ctx.paged:
        raise NotImplementedError("attention_paged is not differentiable: pages have no gradient")
    if grad_out is None and grad_lse is None:
        return (None,) * inputs
    saved = ctx.saved_tensors
    attn_mask, sinks = saved[5], saved[7]
    mask_grad = ctx.needs_input_grad[3]
    *grads, grad_mask, grad_sinks = torch.ops.flashsoftmax.attention_backward.default(
        grad_out, grad_lse, *saved, *ctx.options, mask_grad
    )
    grad_mask = grad_mask.to(attn_mask.dtype) if mask_grad else None
    return (*grads, grad_mask, None, grad_sinks if sinks is not None else None, *(None,) * (inputs - 6))


def _merge_setup(ctx: Any, inputs: tuple[list[Tensor], list[Tensor]], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.states = len(inputs[0])
    ctx.save_for_backward(*inputs[0], *inputs[1], output[1])


def _merge_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, Any]:
    n = ctx.states
    if grad_out is None and grad_lse is None:
        return [None] * n, [None] * n
    saved = ctx.saved_tensors
    grad_outs, grad_lses = torch.ops.flashsoftmax.merge_backward.default(
        grad_out, grad_lse, list(saved[:n]), list(saved[n : 2 * n]), saved[2 * n]
    )
    return list(grad_outs.unbind()), list(grad_lses.unbind())


def _no_double_backward(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError("flashsoftmax has no double backward: its gradients are not differentiable")


torch.library.register_autograd("flashsoftmax::attention", _attention_backward, setup_context=_attention_setup)
torch.library.register_autograd("flashsoftmax::merge", _merge_backward, setup_context=_merge_setup)
for _name in ("attention_backward", "merge_backward"):
    torch.library.register_autograd(f"flashsoftmax::{_name}", _no_double_backward)


# vmap. A batch of batches is a batch, where nothing but the operands is batched; else one call after the other.


def _each(name: str) -> Callable[..., Any]:
    op = getattr(torch.ops.flashsoftmax, name).default

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        leaves, spec = pytree.tree_flatten(args)
        dims = pytree.tree_flatten(in_dims, is_leaf=lambda dim: dim is None)[0]

        def call(i: int) -> Any:
            sample = [x if dim is None else x.select(dim, i) for x, dim in zip(leaves, dims, strict=True)]
            return op(*pytree.tree_unflatten(sample, spec))

        results = [call(i) for i in range(info.batch_size)]
        return tuple(torch.stack(outputs) for outputs in zip(*results, strict=True)), (0,) * len(results[0])

    return rule


_attention_each = _each("attention")


def _attention_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    operands = (0, 1, 2, 3, 6)  # query, key, value, attn_mask, kv_lens
    dense = all(args[n] is None for n in (7, 8, 9))  # cu_seqlens_q, cu_seqlens_k, block_table
    if not dense or any(dim is not None for n, dim in enumerate(in_dims) if n not in operands):
        return _attention_each(info, in_dims, *args)
    n = info.batch_size
    folded = list(args)
    for i in operands:
        if args[i] is not None:
            batched = args[i].movedim(in_dims[i], 0) if in_dims[i] is not None else args[i].expand(n, *args[i].shape)
            folded[i] = batched.flatten(0, 1)
    out, lse = torch.ops.flashsoftmax.attention.default(*folded)
    return (out.unflatten(0, (n, -1)), lse.unflatten(0, (n, -1))), (0, 0)


torch.library.register_vmap("flashsoftmax::attention", _attention_vmap)
for _name in NAMES[1:]:
    torch.library.register_vmap(f"flashsoftmax::{_name}", _each(_name))


# Autocast: query, key and value go to the dtype in force, as for torch's own attention.


def _autocast(device: str, key: str) -> None:
    @torch.library.impl("flashsoftmax::attention", key)
    def attention(*args: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device)
        operands = (x if x.dtype == torch.float64 else x.to(dtype) for x in args[:3])
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            return torch.ops.flashsoftmax.attention.default(*operands, *args[3:])  # type: ignore[no-any-return]


for _device, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    _autocast(_device, _key)
