"""The contract's tolerance, and how a call is held to it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.testing import assert_close

import reference

DIFFERENTIABLE = ("query", "key", "value", "attn_mask", "sinks")


def is_real(x) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def cast(inputs: dict, dtype: torch.dtype) -> dict:
    return {name: x.detach().to(dtype) if is_real(x) else x for name, x in inputs.items()}


def largest_error(x: Tensor, exact: Tensor) -> float:
    """Over the finite entries: a naive computation may overflow where a good one does not."""
    error = (x.double() - exact).abs()
    return error[error.isfinite()].max().item() if error.isfinite().any() else 0.0


def assert_accurate(what: str, actual: Tensor, exact: Tensor, *naive: Tensor) -> None:
    """Error at most 2 x that of the worst naive computation plus one rounding unit, largest errors compared.

    Where `exact` is infinite or NaN, `actual` must be the same.
    """
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    finite = exact.isfinite()
    wrong = (actual.isfinite() != finite) | (~finite & (actual.double().nan_to_num() != exact.nan_to_num()))
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} entries are wrongly finite or not; "
        f"at {wrong.nonzero()[0].tolist()} {actual[wrong][0].item()}, expected {exact[wrong][0].item()}"
    )
    if not finite.any():
        return
    error = (actual.double() - exact).abs().masked_fill(~finite, 0)
    naive_error = max(largest_error(x, exact) for x in naive)
    unit = torch.finfo(actual.dtype).eps * exact[finite].abs().max().item()
    assert error.max() <= 2 * naive_error + unit, (
        f"{what}: error {error.max():.3g} at {(error == error.max()).nonzero()[0].tolist()}, "
        f"allowed 2 x {naive_error:.3g} (naive) + {unit:.3g} (rounding unit); "
        f"{actual.dtype}, shape {tuple(actual.shape)}"
    )


def assert_same_bits(actual, expected) -> None:
    """Of tensors or sequences of tensors. (NaN is NaN, and -0 is 0.)"""
    assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def check_forward(
    call: Callable, inputs: dict, dense: Callable = reference.attention
) -> tuple[Tensor, Tensor]:
    """Holds `call` to `dense`, the same call made of reference.attention. Either returns (out, lse)."""
    out, lse = call(**inputs)
    dtype = inputs["query"].dtype
    statistics = torch.promote_types(dtype, torch.float32)
    assert (out.dtype, lse.dtype) == (dtype, statistics)
    exact_out, exact_lse = dense(**cast(inputs, torch.float64))
    assert_accurate("out", out, exact_out, dense(**inputs)[0])
    assert_accurate("lse", lse, exact_lse, dense(**cast(inputs, statistics))[1])
    return out, lse


def gradients(
    call: Callable, inputs: dict, grads: tuple[Tensor | None, Tensor | None], wrt: list[str]
) -> list[Tensor]:
    """With `grads` those of (out, lse); None leaves that result out of the graph."""
    inputs = inputs | {name: inputs[name].detach().requires_grad_() for name in wrt}
    results = [
        (x, grad.to(x.dtype)) for x, grad in zip(call(**inputs), grads, strict=True) if grad is not None
    ]
    outputs, output_grads = zip(*results, strict=True)
    leaves = [inputs[name] for name in wrt]
    return list(torch.autograd.grad(outputs, leaves, output_grads, allow_unused=True, materialize_grads=True))


def random_gradients(call: Callable, inputs: dict) -> tuple[Tensor, Tensor]:
    out, lse = call(**inputs)
    return torch.randn_like(out), torch.randn_like(lse)


def check_backward(
    call: Callable,
    inputs: dict,
    dense: Callable = reference.attention,
    grads: tuple[Tensor | None, Tensor | None] | None = None,
    wrt: list[str] | None = None,
) -> list[Tensor]:
    """Holds the gradients of `call` to those of `dense`. It hands `softmax` on to reference.attention."""
    grads = random_gradients(call, inputs) if grads is None else grads
    wrt = [name for name in DIFFERENTIABLE if is_real(inputs.get(name))] if wrt is None else wrt
    found = gradients(call, inputs, grads, wrt)
    exact = gradients(dense, cast(inputs, torch.float64), grads, wrt)
    naive = [
        gradients(dense, inputs, grads, wrt),
        gradients(partial(dense, softmax=reference.Textbook.apply), inputs, grads, wrt),
    ]
    for name, actual, wanted, *others in zip(wrt, found, exact, *naive, strict=True):
        assert actual.dtype == inputs[name].dtype, f"gradient of {name}: {actual.dtype}"
        assert_accurate(f"gradient of {name}", actual, wanted, *others)
    return found
