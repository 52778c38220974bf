"""Gradients of the operators, in eager mode, under torch.compile and under torch.func.

Each operator has one autograd.Function. It takes the operator's arguments by position, and a list of tensors as so many
arguments. It runs under the dispatch key Autograd. The transforms of torch.func need it called directly: see `call`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from . import batching
from .library import ARGUMENTS, OPERATORS


def call(function: type[Operator], *inputs: Any) -> Any:
    """The operator of this Function."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return function.apply(*inputs)
    return function.operator(*inputs)


class Operator(Function):
    """What the Functions have in common."""

    @staticmethod
    def operator(*inputs: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def kernel(cls, *args: Any) -> Any:
        """What the dispatcher runs under the key Autograd."""
        inputs = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            cls.jvp()
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return cls.apply(*inputs)
        return cls.forward(*inputs)

    @classmethod
    def forward(cls, *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return cls.operator(*inputs)

    @staticmethod
    def jvp(*args: Any) -> Any:
        raise NotImplementedError("forward-mode differentiation of attention is not implemented; use the backward mode")


class Attention(Operator):
    @staticmethod
    def operator(*inputs: Any) -> Any:
        return OPERATORS["attention"](*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        values = dict(zip(ARGUMENTS["attention"], inputs, strict=True))
        values |= dict(zip(("out", "lse", "lse_error"), output, strict=True))
        saved = {name: values[name] for name in ARGUMENTS["attention_backward"] if name in values}
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(values["lse_error"])
        ctx.tensors = [name for name, x in saved.items() if isinstance(x, Tensor)]
        ctx.save_for_backward(*(saved.pop(name) for name in ctx.tensors))
        ctx.numbers = saved
        ctx.paged = values["block_table"] is not None

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        wanted = dict(zip(ARGUMENTS["attention"], ctx.needs_input_grad, strict=True))
        if ctx.paged:
            raise NotImplementedError("attention_paged is not differentiable: pages have no gradient")
        if wanted["alibi_slopes"]:
            raise NotImplementedError("alibi_slopes: requires_grad is True, wanted False: slopes have no gradient")
        if grad_out is None and grad_lse is None:
            return (None,) * len(wanted)
        values = ctx.numbers | dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))
        values |= {"grad_out": grad_out, "grad_lse": grad_lse, "mask_grad": wanted["attn_mask"]}
        results = call(AttentionBackward, *(values[name] for name in ARGUMENTS["attention_backward"]))
        grads = dict(zip(("query", "key", "value", "attn_mask", "sinks"), results, strict=True))
        if wanted["attn_mask"]:
            grads["attn_mask"] = grads["attn_mask"].to(values["attn_mask"].dtype)
        return tuple(grads[name] if want else None for name, want in wanted.items())

    vmap = staticmethod(batching.attention)


class Merge(Operator):
    @staticmethod
    def operator(*states: Any) -> Any:
        n = len(states) // 2
        return OPERATORS["merge"](list(states[:n]), list(states[n:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.saved_tensors)
        grad_outs, grad_lses = call(MergeBackward, grad_out, grad_lse, *ctx.saved_tensors)
        return (*grad_outs.unbind(), *grad_lses.unbind())

    vmap = staticmethod(batching.merge)


class Backward(Operator):
    """The operators of a backward have no gradient themselves."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("flashsoftmax has no double backward: its gradients are not differentiable")


class AttentionBackward(Backward):
    @staticmethod
    def operator(*inputs: Any) -> Any:
        return OPERATORS["attention_backward"](*inputs)

    vmap = staticmethod(batching.attention_backward)


class MergeBackward(Backward):
    @staticmethod
    def operator(grad_out: Any, grad_lse: Any, *states: Any) -> Any:
        n = len(states) // 2
        return OPERATORS["merge_backward"](grad_out, grad_lse, list(states[:n]), list(states[n:]))

    vmap = staticmethod(batching.merge_backward)


for _name, _function in (
    ("attention", Attention),
    ("attention_backward", AttentionBackward),
    ("merge", Merge),
    ("merge_backward", MergeBackward),
):
    torch.library.impl(f"flashsoftmax::{_name}", "Autograd")(_function.kernel)
