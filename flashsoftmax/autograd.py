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
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if not is_transformed and not _needs_graph(inputs):
        return function.forward(*inputs)
    if function is Attention:
        device = inputs[0].device.type
        if device in autocast.DEVICES and torch.is_autocast_enabled(device):
            inputs = tuple(autocast.cast(device, inputs))  # in the graph, not below it
    return (function if is_transformed else EAGER[function]).apply(*inputs)


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


_PLACES = {name: n for n, name in enumerate((*ARGUMENTS["attention"], "out", "lse", "lse_error"))}
"""Where the inputs and, behind them, the outputs of the operator attention are."""
_KEPT = [_PLACES[name] for name in ARGUMENTS["attention_backward"][2:-1]]
"""What the backward takes between grad_out, grad_lse and bias_grad."""
_DIFFERENTIABLE = [_PLACES[name] for name in ("query", "key", "value", "attn_bias", "sinks")]


class Attention(Operator):
    name = "attention"

    @staticmethod
    def operator(*inputs: Any) -> Any:
        return OPERATORS["attention"](*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        values = (*inputs, *output)
        kept = [values[place] for place in _KEPT]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])
        ctx.tensors = [n for n, x in enumerate(kept) if isinstance(x, Tensor)]
        ctx.save_for_backward(*[kept[n] for n in ctx.tensors])
        for n in ctx.tensors:
            kept[n] = None
        ctx.kept = kept
        ctx.paged = inputs[_PLACES["block_table"]] is not None

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad
        if ctx.paged:
            raise NotImplementedError("attention_paged is not differentiable: pages have no gradient")
        if wanted[_PLACES["alibi_slopes"]]:
            raise NotImplementedError("alibi_slopes: requires_grad is True, wanted False: slopes have no gradient")
        grads: list[Tensor | None] = [None] * len(wanted)
        if grad_out is None and grad_lse is None:
            return tuple(grads)
        kept = ctx.kept.copy()
        for n, x in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            kept[n] = x
        bias_grad = wanted[_PLACES["attn_bias"]]
        results = call(AttentionBackward, grad_out, grad_lse, *kept, bias_grad)
        for place, x in zip(_DIFFERENTIABLE, results, strict=True):
            grads[place] = x if wanted[place] else None
        if bias_grad:
            bias = kept[_KEPT.index(_PLACES["attn_bias"])]
            grads[_PLACES["attn_bias"]] = results[3].to(bias.dtype)
        return tuple(grads)

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


def _eager(function: type[Operator]) -> type[Function]:
    """The Function without support for transforms: calling setup_context in forward saves a quarter of the time."""

    class Eager(function):  # type: ignore[misc, valid-type]
        setup_context = Function.setup_context

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = function.forward(*inputs)
            function.setup_context(ctx, inputs, output)
            return output

    return Eager


EAGER: dict[type[Operator], type[Function]] = {
    x: _eager(x) for x in (Attention, AttentionBackward, Merge, MergeBackward)
}

for _function in EAGER:
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
