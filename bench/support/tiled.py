"""The recurrence over tiles of keys, and two ways to get it wrong. For pictures; the kernels use csrc/softmax.h."""

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
    """Row states after a tile: m, l and alpha [rows], acc [rows, dim]."""

    m: Tensor
    l: Tensor  # noqa: E741
    acc: Tensor
    alpha: Tensor
    """The factor by which l and acc were multiplied before the keys of the tile were added."""

    @property
    def output(self) -> Tensor:
        return self.acc / self.l[:, None]


def steps(
    scores: Tensor, values: Tensor, tile: int, *, first_m: float = -math.inf, rescale_acc: bool = True
) -> Iterator[Step]:
    """The row states after each tile of scores [rows, keys] and values [keys, dim], computed in float32.

    Two mistakes can be asked for. first_m = 0: m does not start below every score. rescale_acc = False: acc is not
    rescaled with l.
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
    """Attention by these steps, head by head, in tiles of 128 keys; each query sees all keys."""
    out = torch.empty_like(query)
    for b in range(shape.batch):
        for h in range(shape.heads):
            kv = h // shape.group
            scores = query[b, h].float() @ key[b, kv].float().mT * shape.dim**-0.5
            *_, last = steps(scores, value[b, kv], 128, first_m=first_m, rescale_acc=rescale_acc)
            out[b, h] = last.output
    return out
