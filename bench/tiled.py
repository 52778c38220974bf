"""The recurrence over tiles of keys, and two ways to get it wrong. For pictures; csrc/softmax.h is what runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashsoftmax.state import weight

from .shapes import Shape


@dataclass(frozen=True)
class Step:
    """The states of the rows after a tile: m, l, alpha [rows], acc [rows, dim]."""

    m: Tensor
    l: Tensor  # noqa: E741
    acc: Tensor
    alpha: Tensor
    """What the tile multiplied l and acc by, before its own keys were added."""

    @property
    def output(self) -> Tensor:
        return self.acc / self.l[:, None]


def steps(
    scores: Tensor, values: Tensor, tile: int, *, first_m: float = -math.inf, rescale_acc: bool = True
) -> Iterator[Step]:
    """After each tile of scores [rows, keys] and values [keys, dim], in float32.

    first_m = 0 and rescale_acc = False are the mistakes: m that does not start below every score, and an accumulator
    that stays behind when l is rescaled.
    """
    rows = len(scores)
    m = torch.full((rows,), first_m, device=scores.device)
    l, acc = torch.zeros_like(m), m.new_zeros(rows, values.shape[-1])  # noqa: E741
    for s, v in zip(scores.float().split(tile, 1), values.float().split(tile), strict=True):
        higher = torch.maximum(m, s.amax(1))
        alpha = weight(m, higher)
        weights = weight(s, higher[:, None])
        m, l = higher, l * alpha + weights.sum(1)  # noqa: E741
        acc = (acc * alpha[:, None] if rescale_acc else acc) + weights @ v
        yield Step(m, l, acc, alpha)


def tiled(
    query: Tensor, key: Tensor, value: Tensor, shape: Shape, *, first_m: float = -math.inf, rescale_acc: bool = True
) -> Tensor:
    """Attention by these steps, head by head: tiles of 128 keys, all keys visible to each query."""
    out = torch.empty_like(query)
    for b in range(shape.batch):
        for h in range(shape.heads):
            kv = h // shape.group
            scores = query[b, h].float() @ key[b, kv].float().mT * shape.dim**-0.5
            *_, last = steps(scores, value[b, kv], 128, first_m=first_m, rescale_acc=rescale_acc)
            out[b, h] = last.output
    return out
