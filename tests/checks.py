"""The contract's tolerance, and how a call is held to it."""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.testing import assert_close

import reference


def is_real(x) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def differentiable(inputs: dict) -> list[str]:
    return [name for name in ("query", "key", "value", "attn_mask", "attn_bias", "sinks") if is_real(inputs.get(name))]


def cast(inputs: dict, dtype: torch.dtype) -> dict:
    return {name: x.detach().to(dtype) if is_real(x) else x for name, x in inputs.items()}


def largest_error(x: Tensor, exact: Tensor) -> float:
    """Over the finite entries: a naive computation may overflow where a good one does not."""
    error = (x.double() - exact).abs()
    return error[error.isfinite()].max().item() if error.isfinite().any() else 0.0


def assert_accurate(what: str, actual: Tensor, exact: Tensor, *naive: Tensor, slack: float = 1) -> None:
    """Error at most 2 x that of the worst naive computation plus one rounding unit, largest errors compared.

    Where `exact` is infinite or NaN, `actual` must be the same. In a small problem a naive computation may be
    exact by luck; `slack` is for inputs that are not chosen. A weight below float32's normal numbers may be 0.
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
    unit = torch.finfo(actual.dtype).eps * exact[finite].abs().max().item() + torch.finfo(torch.float32).tiny
    assert error.max() <= slack * (2 * naive_error + unit), (
        f"{what}: error {error.max():.3g} at {(error == error.max()).nonzero()[0].tolist()}, "
        f"allowed {slack} x (2 x {naive_error:.3g} (naive) + {unit:.3g} (rounding unit)); "
        f"{actual.dtype}, shape {tuple(actual.shape)}"
    )


def assert_same_bits(actual, expected) -> None:
    """Of tensors or sequences of tensors. (NaN is NaN, and -0 is 0.)"""
    assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_accurate_draws(errors: Callable, inputs: dict | Callable[[], dict], slack: float) -> None:
    """`errors` has the arguments of assert_accurate for each tensor that comes of the inputs.

    Where `inputs` can be drawn again, what is over the line in one draw may be so by luck. It is not if it is over
    the line in 4 draws and in 16, compared as one tensor.
    """
    draw, counts = (inputs, (1, 4, 16)) if callable(inputs) else (lambda: inputs, (1,))
    draws: list[list[tuple]] = []
    for count in counts:
        draws += [errors(draw()) for _ in range(count - len(draws))]
        try:
            for tensors in zip(*draws, strict=True):
                names, *columns = zip(*tensors, strict=True)
                assert_accurate(names[0], *map(torch.stack, columns), slack=slack)
            return
        except AssertionError:
            if count == counts[-1]:
                raise


def orders(dtype: torch.dtype) -> tuple[bool, ...]:
    """Of summation: whether reordered. Rounding to 16 bits hides the difference."""
    return (False,) if dtype.itemsize == 2 else (False, True)


def check_forward(
    call: Callable,
    inputs: dict | Callable[[], dict],
    dense: Callable = reference.attention,
    slack: float = 1,
) -> None:
    """Holds `call` to `dense`, the same call made of reference.attention. Either returns (out, lse)."""

    def errors(inputs):
        out, lse = call(**inputs)
        dtype = inputs["query"].dtype
        statistics = torch.promote_types(dtype, torch.float32)
        assert (out.dtype, lse.dtype) == (dtype, statistics)
        exact_out, exact_lse = dense(**cast(inputs, torch.float64))
        naive_out = [dense(**inputs, reordered=order)[0] for order in orders(dtype)]
        naive_lse = [dense(**cast(inputs, statistics), reordered=order)[1] for order in orders(statistics)]
        return [("out", out, exact_out, *naive_out), ("lse", lse, exact_lse, *naive_lse)]

    assert_accurate_draws(errors, inputs, slack)


def gradients(call: Callable, inputs: dict, grads: tuple[Tensor | None, Tensor | None], wrt: list[str]) -> list[Tensor]:
    """With `grads` those of (out, lse); None leaves that result out of the graph."""
    inputs = inputs | {name: inputs[name].detach().requires_grad_() for name in wrt}
    results = [(x, grad.to(x.dtype)) for x, grad in zip(call(**inputs), grads, strict=True) if grad is not None]
    outputs, output_grads = zip(*results, strict=True)
    leaves = [inputs[name] for name in wrt]
    return list(torch.autograd.grad(outputs, leaves, output_grads, allow_unused=True, materialize_grads=True))


def random_gradients(
    call: Callable, inputs: dict, of: tuple[str, ...] = ("out", "lse")
) -> tuple[Tensor | None, Tensor | None]:
    results = zip(("out", "lse"), call(**inputs), strict=True)
    return tuple(torch.randn_like(x) if name in of else None for name, x in results)


def check_backward(
    call: Callable,
    inputs: dict | Callable[[], dict],
    dense: Callable = reference.attention,
    of: tuple[str, ...] = ("out", "lse"),
    slack: float = 1,
) -> None:
    """Holds the gradients of `call` to those of `dense`, which hands `reordered` and `textbook` on.

    Of the results named, all inputs that have one, for a random upstream gradient.
    """

    def errors(inputs):
        upstream = random_gradients(call, inputs, of)
        wrt = differentiable(inputs)
        found = gradients(call, inputs, upstream, wrt)
        exact = gradients(dense, cast(inputs, torch.float64), upstream, wrt)
        naive = [
            gradients(partial(dense, reordered=order, textbook=textbook), inputs, upstream, wrt)
            for order, textbook in product(orders(inputs["query"].dtype), (False, True))
        ]
        assert [x.dtype for x in found] == [inputs[name].dtype for name in wrt]
        return list(zip([f"gradient of {name}" for name in wrt], found, exact, *naive, strict=True))

    assert_accurate_draws(errors, inputs, slack)
