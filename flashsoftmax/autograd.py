"""Gradients of the operators, in eager mode, under torch.compile and under torch.func.

Each operator has one autograd.Function. It takes the operator's arguments by position; lists of tensors are flattened.
It runs under the dispatch key Autograd. The transforms of torch.func need it called directly: see `call`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from . import autocast, batching
from .library import ARGUMENTS, OPERATORS, flattened


def call(function: type[Operator], *inputs: Any) -> Any:
    """Calls the operator of a Function, in the way that the active transforms need."""
    if torch.compiler.is_compiling():
        return function.operator(*inputs)
    if torch._C._functorch.peek_interpreter_stack() is not None:
        device = next(x for x in inputs if isinstance(x, Tensor)).device.type
        if function is Attention and device in autocast.DEVICES and torch.is_autocast_enabled(device):
            inputs = tuple(autocast.cast(device, inputs))  # in the graph, not below it
        return function.apply(*inputs)
    if _needs_graph(inputs):
        return function.operator(*inputs)
    return function.forward(*inputs)


def _needs_graph(inputs: tuple[Any, ...]) -> bool:
    """Whether autograd must record the call. Raises in forward mode, where tangents would silently be lost."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in _tensors(inputs)):
        Operator.jvp()
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    return [x for x in flattened(args) if isinstance(x, Tensor)]


class Operator(Function):
    """What the Functions have in common."""

    name: str

    @staticmethod
    def operator(*inputs: Any) -> Any:
        """Calls the operator with the inputs of the Function."""
        raise NotImplementedError

    @classmethod
    def kernel(cls, *args: Any) -> Any:
        """What the dispatcher runs under the key Autograd."""
        if _needs_graph(args):
            return cls.apply(*flattened(args))
        with torch._C._AutoDispatchBelowAutograd():
            return OPERATORS[cls.name](*args)

    @classmethod
    def forward(cls, *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return cls.operator(*inputs)

    @staticmethod
    def jvp(*args: Any) -> Any:
        raise NotImplementedError("flashsoftmax has no forward-mode differentiation; use reverse mode")


class Attention(Operator):
    name = "attention"

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
        ctx.non_tensors = saved
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
        values = ctx.non_tensors | dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))
        values |= {"grad_out": grad_out, "grad_lse": grad_lse, "bias_grad": wanted["attn_bias"]}
        results = call(AttentionBackward, *(values[name] for name in ARGUMENTS["attention_backward"]))
        grads = dict(zip(("query", "key", "value", "attn_bias", "sinks"), results, strict=True))
        if wanted["attn_bias"]:
            grads["attn_bias"] = grads["attn_bias"].to(values["attn_bias"].dtype)
        return tuple(grads[name] if want else None for name, want in wanted.items())

    vmap = staticmethod(batching.attention)


class Merge(Operator):
    name = "merge"

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
    name = "attention_backward"

    @staticmethod
    def operator(*inputs: Any) -> Any:
        return OPERATORS["attention_backward"](*inputs)

    vmap = staticmethod(batching.attention_backward)


class MergeBackward(Backward):
    name = "merge_backward"

    @staticmethod
    def operator(grad_out: Any, grad_lse: Any, *states: Any) -> Any:
        n = len(states) // 2
        return OPERATORS["merge_backward"](grad_out, grad_lse, list(states[:n]), list(states[n:]))

    vmap = staticmethod(batching.merge_backward)


for _function in (Attention, AttentionBackward, Merge, MergeBackward):
    torch.library.impl(f"flashsoftmax::{_function.name}", "Autograd")(_function.kernel)


def _without_gradient(name: str) -> Callable[..., Any]:
    """What the dispatcher runs under the key Autograd for an operator without a gradient."""

    def kernel(*args: Any) -> Any:
        if _needs_graph(args):
            raise NotImplementedError(f"{name} has no gradient: requires_grad is True, wanted False (or no_grad)")
        with torch._C._AutoDispatchBelowAutograd():
            return OPERATORS[name](*args)

    return kernel


for _name in ("append_kv", "rotary"):
    torch.library.impl(f"flashsoftmax::{_name}", "Autograd")(_without_gradient(_name))


@torch.library.impl("flashsoftmax::append_kv", "ADInplaceOrView")
def _append_kv(key_cache: Tensor, value_cache: Tensor, *args: Any) -> None:
    """Tells autograd that the cache was written, so that a backward through its old values raises."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        OPERATORS["append_kv"](key_cache, value_cache, *args)
    torch.autograd.graph.increment_version((key_cache, value_cache))
