"""The shapes that are measured, their work in FLOPs and bytes, and random inputs for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Kind = Literal["forward", "forward + backward", "decode"]


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    """The gradient of the output."""


@dataclass(frozen=True)
class Shape:
    kind: Kind
    batch: int
    heads: int
    heads_kv: int
    queries: int
    keys: int
    dim: int
    causal: bool = False
    window: int | None = None
    """How many keys before its own position a query sees; None: all."""
    filled: int | None = None
    """How many keys are filled; None: all."""
    documents: int | None = None
    """The length of documents that do not see each other; None: one document."""
    half: bool = False
    """Whether each query sees a random half of the keys."""
    as_mask: bool = False
    """Whether the visible keys are given as a bool mask, which is made beforehand, instead of by options."""
    model: str = ""
    """The model that has this shape, and where in it; empty if the shape is of no certain model."""

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        name, shown = self.model and f"{self.model}: ", self.shown and f" {self.shown}"
        return f"{name}{self.kind} B{self.batch} H{heads} {self.queries} x {self.keys} D{self.dim}{shown}"

    @property
    def shown(self) -> str:
        """The visible keys, in words; empty if all are."""
        rules = {
            "causal": self.causal,
            f"window {self.window}": self.window is not None,
            f"{self.filled} filled": self.filled is not None,
            f"documents of {self.documents}": self.documents is not None,
            "random half": self.half,
        }
        words = " ".join(rule for rule, applies in rules.items() if applies)
        return f"{words} as mask" if self.as_mask else words

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.heads_kv

    def first(self, query: int) -> int:
        """The first key that the query sees. The last query is at the position of the last key."""
        own = query + self.keys - self.queries
        document = own // self.documents * self.documents if self.documents else 0
        return document if self.window is None else max(document, own - self.window)

    def end(self, query: int) -> int:
        """One past the last key that the query sees. Less than or equal to `first` if it sees none."""
        filled = self.keys if self.filled is None else self.filled
        return min(query + self.keys - self.queries + 1, filled) if self.causal else filled

    @property
    def visible(self) -> int:
        """Pairs of a query and a visible key, per head."""
        return sum(max(0, self.end(i) - self.first(i)) for i in range(self.queries)) // (1 + self.half)

    @property
    def flops(self) -> float:
        """Two products forward and five more backward, each of 2 FLOPs per visible pair and dimension."""
        forward = 4 * self.batch * self.heads * self.visible * self.dim
        return forward * (3.5 if self.kind == "forward + backward" else 1)

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Of the filled keys and values."""
        return 2 * self.batch * self.heads_kv * (self.filled or self.keys) * self.dim * dtype.itemsize

    @property
    def score_bytes(self) -> int:
        """Bytes of the scores and the weights in float32."""
        return 8 * self.batch * self.heads * self.queries * self.keys

    @property
    def repeated_bytes(self) -> int:
        """Bytes of the keys and values in float32, repeated for each query head."""
        return 8 * self.batch * self.heads * self.keys * self.dim

    def hidden(self, rows: Tensor) -> Tensor | None:
        """[rows, keys]: True where the query does not see the key. None if every query sees every key."""
        if not replace(self, as_mask=False).shown:
            return None
        keys = torch.arange(self.keys, device=rows.device)
        own = rows[:, None] + (self.keys - self.queries)
        hidden = (keys > own) & self.causal
        if self.window is not None:
            hidden = hidden | (keys < own - self.window)
        if self.filled is not None:
            hidden = hidden | (keys >= self.filled)
        if self.documents is not None:
            hidden = hidden | (keys // self.documents != own // self.documents)
        if self.half:
            random = torch.rand(self.queries, self.keys, generator=torch.Generator().manual_seed(0))
            hidden = hidden | (random < 0.5).to(rows.device)[rows]
        return hidden

    @cache  # noqa: B019 - a few masks in a process that ends soon
    def mask(self, device: torch.device) -> Tensor | None:
        """True where the query sees the key, for the mask of a call; one row if that is enough."""
        one_row = replace(self, filled=None, as_mask=False).shown == ""
        hidden = self.hidden(torch.arange(1 if one_row else self.queries, device=device))
        return None if hidden is None else ~hidden

    def inputs(self, dtype: torch.dtype, device: str) -> Inputs:
        torch.manual_seed(0)
        query = (self.batch, self.heads, self.queries, self.dim)
        key = (self.batch, self.heads_kv, self.keys, self.dim)
        inputs = Inputs(*(torch.randn(size, dtype=dtype, device=device) for size in (query, key, key, query)))
        for x in inputs[:3]:
            x.requires_grad_(self.kind == "forward + backward")
        return inputs


def square(kind: Kind, lengths: tuple[int, ...], dims: tuple[int, ...] = (64, 128)) -> tuple[Shape, ...]:
    return tuple(
        Shape(kind, 1, 8, 8, length, length, dim, causal)
        for dim in dims
        for causal in (False, True)
        for length in lengths
    )


def decode(
    lengths: tuple[int, ...], batches: tuple[int, ...] = (1, 8), heads_kv: tuple[int, ...] = (32, 8)
) -> tuple[Shape, ...]:
    return tuple(
        Shape("decode", batch, 32, heads, 1, length, 128)
        for heads in heads_kv
        for batch in batches
        for length in lengths
    )


def filled(kind: Kind, lengths: tuple[int, ...]) -> tuple[Shape, ...]:
    """16,384 tokens in 16 heads: enough work for all multiprocessors of a large GPU."""
    return tuple(
        Shape(kind, 16384 // length, 16, 16, length, length, dim, causal)
        for dim in (64, 128)
        for causal in (False, True)
        for length in lengths
    )


def masks() -> tuple[Shape, ...]:
    """Bool masks beside the options that show the same keys, as far as there are such options."""
    causal: dict[str, Any] = {"causal": True}
    rules: tuple[dict[str, Any], ...] = ({}, causal, causal | {"window": 255}, {"filled": 1536})
    only_masks: tuple[dict[str, Any], ...] = (causal | {"documents": 256}, {"half": True})
    kinds: tuple[Kind, ...] = ("forward", "forward + backward")
    tiled = [
        Shape(kind, 1, 16, 4, 2048, 2048, 64, **rule, as_mask=as_mask)
        for kind in kinds
        for as_mask, all_rules in ((False, rules), (True, rules[1:] + only_masks))
        for rule in all_rules
    ]
    return (*tiled, *(Shape("decode", 1, 16, 4, 1, 8192, 64, filled=512, as_mask=as_mask) for as_mask in (False, True)))


def models() -> tuple[Shape, ...]:
    """Shapes of well-known models: a forward each, and a backward of those that are usually trained."""

    kinds: tuple[Kind, ...] = ("forward", "forward + backward")

    def both(model: str, batch: int, heads: int, length: int, dim: int) -> tuple[Shape, ...]:
        return tuple(Shape(kind, batch, heads, heads, length, length, dim, model=model) for kind in kinds)

    def llama(queries: int, keys: int, batch: int = 1, kind: Kind = "forward") -> Shape:
        name = "Llama prefill" if queries == keys else "Llama decode" if kind == "decode" else "Llama chunk"
        return Shape(kind, batch, 32, 8, queries, keys, 128, causal=queries > 1, model=name)

    return (
        *both("BERT", 1, 12, 128, 64),
        *both("BERT", 32, 12, 128, 64),
        *both("ViT-B", 1, 12, 197, 64),
        *both("ViT-B", 16, 12, 197, 64),
        *both("ViT-H", 1, 16, 257, 80),
        *both("Swin window", 256, 4, 49, 32),
        Shape("forward", 2, 8, 8, 4096, 4096, 40, model="Stable Diffusion"),
        Shape("forward", 2, 8, 8, 4096, 77, 40, model="Stable Diffusion cross"),
        Shape("forward", 2, 8, 8, 64, 77, 160, model="Stable Diffusion cross"),
        Shape("forward", 1, 20, 20, 1500, 1500, 64, model="Whisper encoder"),
        Shape("decode", 1, 20, 20, 1, 1500, 64, model="Whisper cross step"),
        Shape("decode", 1, 20, 20, 1, 100, 64, model="Whisper self step"),
        llama(33, 33),
        *(llama(length, length, kind=kind) for length in (512, 2048) for kind in kinds),
        *(llama(1, keys, batch, "decode") for batch in (1, 16) for keys in (16, 128, 512, 8192)),
        llama(5, 2048),
        llama(32, 8192),
        llama(128, 8192),
        *both("full attention", 1, 8, 512, 128),
        Shape("forward", 1, 8, 4, 1024, 1024, 256, causal=True, model="Gemma prefill"),
        Shape("decode", 1, 8, 4, 1, 2048, 256, model="Gemma decode"),
        Shape("forward", 1, 71, 1, 512, 512, 64, causal=True, model="Falcon prefill"),
        Shape("decode", 1, 71, 1, 1, 2048, 64, model="Falcon decode"),
        Shape("forward", 4, 8, 8, 256, 256, 8, model="head_dim 8"),
        Shape("forward", 1, 8, 8, 16, 16, 64, model="16 tokens"),
    )


SUITES = {
    "prefill": square("forward", (512, 2048, 8192)),
    "backward": square("forward + backward", (512, 2048)),
    "decode": decode((1024, 8192, 65536)),
    "masks": masks(),
    "models": models(),
    "gpu-prefill": filled("forward", (1024, 4096, 16384)),
    "gpu-backward": filled("forward + backward", (1024, 4096)),
    "gpu-decode": (*decode((8192, 131072), batches=(1,)), *decode((8192,), batches=(32,))),
    "quick": (
        *square("forward", (256, 1024), dims=(64,)),
        *square("forward + backward", (512,), dims=(64,)),
        *decode((1024, 4096), batches=(1,), heads_kv=(8,)),
    ),
}
