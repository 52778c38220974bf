"""Partial results, and the fixed tree by which they are merged."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import merge as merge_states
from ..library import statistics


@dataclass(frozen=True)
class State:
    """Attention over some of the keys, in float32 (float64 for float64).

    out [B, H, rows, D]; lse [B, H, rows] and what its rounding took from it: of a large lse that is all of ln l.
    """

    out: Tensor
    lse: Tensor
    lse_error: Tensor

    def merge(self, other: State) -> State:
        """The state of the keys of both. The operator gets each lse relative to the larger one, where it is exact."""
        out, lse, lse_error = merge_exact([self.out, other.out], [self.exact_lse, other.exact_lse])
        return State(out, lse, lse_error)

    @property
    def exact_lse(self) -> Tensor:
        return self.lse.double() + self.lse_error.double()


def merge_exact(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, lse_error) of states with lses in float64."""
    dtype = statistics(outs[0].dtype)
    level = functools.reduce(torch.maximum, lses)
    level = level.masked_fill(level.isinf(), 0)
    out, relative = merge_states(outs, [(x - level).to(dtype) for x in lses])
    exact = relative.double() + level
    lse = exact.to(dtype)
    return out, lse, (exact - lse.double()).masked_fill(lse.isinf(), 0).to(dtype)


class Tree:
    """Merges states by a binary tree over the numbers of their leaves, whatever order they come in.

    `leaves` says which will come; others are empty. In the order of a ring, at most two states wait per level.
    """

    def __init__(self, leaves: frozenset[int]) -> None:
        self.levels = [set(leaves)]
        while len(self.levels[-1]) > 1:
            self.levels.append({n >> 1 for n in self.levels[-1]})
        self.waiting: dict[tuple[int, int], State] = {}

    def add(self, leaf: int, state: State) -> None:
        level, n = 0, leaf
        while level + 1 < len(self.levels):
            if n ^ 1 in self.levels[level]:
                sibling = self.waiting.pop((level, n ^ 1), None)
                if sibling is None:
                    break
                state = state.merge(sibling)  # the same bits in either order
            level, n = level + 1, n >> 1
        self.waiting[level, n] = state

    @property
    def result(self) -> State | None:
        """The state of all leaves, once all have come; None if there are none."""
        return next(iter(self.waiting.values()), None)
