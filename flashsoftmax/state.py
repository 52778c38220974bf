"""The state of a softmax over a set of keys: csrc/softmax.h again, for people and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def weight(score: Tensor, m: Tensor) -> Tensor:
    """e^(score - m). If m is -inf (no key seen), 0 is subtracted instead, because -inf - -inf is NaN."""
    return torch.exp(score - m.masked_fill(m == -torch.inf, 0))


@dataclass(frozen=True, eq=False)
class State:
    """(m, l, acc) of a set of keys: m = max s_i, l = sum e^(s_i - m), acc = sum e^(s_i - m) v_i.

    States of disjoint sets merge, in any order: `a | b`. The empty state (-inf, 0, 0) is the identity.

    Shapes: m and l [...], acc [..., d], the leading axes broadcast. Scores are in natural units (e^score) and
    already scaled and masked (-inf hides a key). m, l and acc are float64 for float64 inputs and float32 for
    all others; `dtype` is what `output` is returned in. Differentiable through l and acc; m is a constant.
    """

    m: Tensor
    l: Tensor  # noqa: E741
    acc: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, scores: Tensor, values: Tensor) -> State:
        """The state of a block of n keys: scores [..., n], values [..., n, d]. n may be 0."""
        _check_floating(scores=scores, values=values)
        found = f"found scores {[*scores.shape]} and values {[*values.shape]}"
        if scores.ndim < 1 or values.ndim < 2 or scores.shape[-1] != values.shape[-2]:
            raise ValueError(f"scores, values: wanted [..., n] and [..., n, d], {found}")
        axes = zip(reversed(scores.shape[:-1]), reversed(values.shape[:-2]), strict=False)
        if any(a != b and 1 not in (a, b) for a, b in axes):
            raise ValueError(f"scores, values: wanted leading axes that broadcast, {found}")
        dtype, statistics = values.dtype, _statistics(scores, values)
        scores, values = scores.to(statistics), values.to(statistics)
        m = scores.detach().amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
        weights = weight(scores, m[..., None])
        with torch.autocast(scores.device.type, enabled=False):
            acc = torch.einsum("...n,...nd->...d", weights, values)
        return cls(m, weights.sum(-1), acc, dtype)

    @classmethod
    def empty(
        cls,
        shape: Sequence[int] = (),
        *,
        dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> State:
        """The state of no key, for rows of this shape and values of `dim` elements."""
        acc = torch.zeros(*shape, dim, dtype=dtype, device=device)
        return cls.of(acc.new_empty(*shape, 0), acc.new_empty(*shape, 0, dim))

    @classmethod
    def from_lse(cls, output: Tensor, lse: Tensor) -> State:
        """The state of finished rows: output [..., d], lse [...]. An infinite lse means an empty row."""
        _check_floating(output=output, lse=lse)
        if output.shape[:-1] != lse.shape:
            found = f"found {[*output.shape]} and {[*lse.shape]}"
            raise ValueError(f"output, lse: wanted [..., d] and [...], {found}")
        dtype, statistics = output.dtype, _statistics(output, lse)
        empty = lse.isinf()
        lse = lse.to(statistics).masked_fill(empty, -torch.inf)
        m = lse.detach()
        l = weight(lse, m)  # noqa: E741
        return cls(m, l, output.to(statistics).masked_fill(empty[..., None], 0) * l[..., None], dtype)

    def merge(self, other: State) -> State:
        """The state of both sets of keys, which must be disjoint."""
        d, found = self.acc.shape[-1], other.acc.shape[-1]
        if d != found:
            raise ValueError(f"other: wanted values of {d} elements, found {found}")
        m = torch.maximum(self.m, other.m)
        a, b = weight(self.m, m), weight(other.m, m)
        acc = self.acc * a[..., None] + other.acc * b[..., None]
        return State(m, self.l * a + other.l * b, acc, torch.promote_types(self.dtype, other.dtype))

    def __or__(self, other: State) -> State:
        return self.merge(other) if isinstance(other, State) else NotImplemented

    @property
    def output(self) -> Tensor:
        """[..., d]: acc / l, and 0 for an empty row."""
        return (self.acc / self._sum[..., None]).to(self.dtype)

    @property
    def lse(self) -> Tensor:
        """[...]: m + ln l, and -inf for an empty row."""
        return self.m + self._sum.log()

    @property
    def _sum(self) -> Tensor:
        return self.l.masked_fill(self.l == 0, 1)


def _statistics(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _check_floating(**arguments: Tensor) -> None:
    for name, x in arguments.items():
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name}: wanted a floating-point tensor, found {found}")
