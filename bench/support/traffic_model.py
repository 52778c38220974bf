"""Predicts the bytes that attention moves: a formula for what each kernel reads and writes of each tensor.

There are two figures per tensor. `asked` is the sum over what all threads ask for: a tile of keys counts once per block
that reads it, and caches serve most of these reads. `distinct` counts every byte once per kernel: the least that memory
must move if no cache keeps a tensor from one kernel to the next. For our kernels, tests/test_bench_traffic.py compares
both with the bytes that the real kernels move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .shapes import Shape

STATE_BYTES = 8
"""m and l of a row, in float32."""
LSE_BYTES = 4
MATMUL_TILE = 128
"""Rows and columns per block of a matrix product in the unfused pipeline."""


@dataclass(frozen=True)
class Moved:
    asked: int
    distinct: int


@dataclass(frozen=True)
class Kernel:
    name: str
    reads: Mapping[str, Moved]
    writes: Mapping[str, Moved]
    flops: float

    @property
    def asked(self) -> int:
        return sum(moved.asked for moved in (*self.reads.values(), *self.writes.values()))

    @property
    def distinct(self) -> int:
        return sum(moved.distinct for moved in (*self.reads.values(), *self.writes.values()))


def once(count: int) -> Moved:
    return Moved(count, count)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def matmul(m: int, n: int, k: int) -> tuple[int, int]:
    """Elements asked of [m, k] and of [k, n] by a product whose blocks make MATMUL_TILE rows and columns each."""
    return m * k * ceil_div(n, MATMUL_TILE), k * n * ceil_div(m, MATMUL_TILE)


def unfused(shape: Shape, dtype: torch.dtype) -> list[Kernel]:
    """S = Q K^T, P = softmax(S), O = P V, each a kernel.

    The softmax keeps a row of S on chip. Every score is computed and written, also of hidden keys. Query heads that
    share a key head are rows of one product.
    """
    size, heads = dtype.itemsize, shape.batch * shape.heads_kv
    m, n, d = shape.group * shape.queries, shape.keys, shape.dim
    rows, keys, scores = heads * m * d * size, heads * n * d * size, heads * m * n * size
    q, k = (heads * size * elements for elements in matmul(m, n, d))
    p, v = (heads * size * elements for elements in matmul(m, d, n))
    flops = 2 * heads * m * n * d
    return [
        Kernel("scores", {"query": Moved(q, rows), "key": Moved(k, keys)}, {"S": once(scores)}, flops),
        Kernel("softmax", {"S": once(scores)}, {"P": once(scores)}, 0),
        Kernel("output", {"P": Moved(p, scores), "value": Moved(v, keys)}, {"out": once(rows)}, flops),
    ]


def two_pass(shape: Shape, dtype: torch.dtype) -> list[Kernel]:
    """First m and l of each row, then the scores once more, with their final weights.

    No score is written and no accumulator is rescaled, but keys are read twice and there are three products instead of
    two. The tiles are those of our kernels.
    """
    q, k, v, o = (tensors(shape, dtype)[name] for name in ("query", "key", "value", "out"))
    states = once(shape.batch * shape.heads * shape.queries * STATE_BYTES)
    return [
        Kernel("statistics", {"query": q, "key": k}, {"states": states}, shape.flops / 2),
        Kernel("output", {"query": q, "key": k, "value": v, "states": states}, {"out": o}, shape.flops),
    ]


def forward(shape: Shape, dtype: torch.dtype) -> list[Kernel]:
    """csrc/cuda/sm80/forward.cuh: a block has one tile of queries, and loops over the tiles of keys that they see."""
    moved = tensors(shape, dtype)
    lse = once(shape.batch * shape.heads * shape.queries * LSE_BYTES)
    reads = {name: moved[name] for name in ("query", "key", "value")}
    return [Kernel("forward", reads, {"out": moved["out"], "lse": lse, "lse_error": lse}, shape.flops)]


def decode(shape: Shape, dtype: torch.dtype) -> list[Kernel]:
    """csrc/cuda/sm80/decode.cuh: each block has one split of the keys, and the queries of all heads that share them.

    csrc/cuda/merge.cu then merges the states of the splits.
    """
    moved = tensors(shape, dtype)
    reads = {name: moved[name] for name in ("query", "key", "value")}
    rows, splits = shape.batch * shape.heads * shape.queries, split_ranges(shape)
    lse = once(rows * LSE_BYTES)
    results = {"out": moved["out"], "lse": lse, "lse_error": lse}
    if len(splits) == 1:
        return [Kernel("decode", reads, results, shape.flops)]

    filled = sum(len(keys) > 0 for keys in splits)
    states = len(splits) * rows * STATE_BYTES
    acc = filled * rows * ceil_div(shape.dim, 4) * 16
    # Each lane of a row has `width` elements of acc, and reads the states of the whole row.
    width = 4 if shape.dim % 4 == 0 else 1
    needed = ceil_div(shape.dim, width)
    lanes = min(32, 1 << (needed - 1).bit_length())
    asked = states * lanes * ceil_div(needed, lanes)
    merged = {"states": Moved(asked, states), "acc": once(filled * rows * shape.dim * 4)}
    return [
        Kernel("decode", reads, {"states": once(states), "acc": once(acc)}, shape.flops),
        Kernel("merge", merged, results, 0),
    ]


def ours(shape: Shape, dtype: torch.dtype) -> list[Kernel]:
    return decode(shape, dtype) if is_decode(shape) else forward(shape, dtype)


PIPELINES: dict[str, Callable[[Shape, torch.dtype], list[Kernel]]] = {
    "unfused": unfused,
    "two-pass": two_pass,
    "flashsoftmax": ours,
}


def is_decode(shape: Shape) -> bool:
    return shape.queries <= 16


def split_ranges(shape: Shape) -> list[range]:
    """For each split, the range of its keys that some query sees."""
    size = ceil_div(max(1024, 16 * shape.queries), 128) * 128
    first, end = shape.first(0), shape.end(shape.queries - 1)
    count = max(1, ceil_div(shape.keys, size))
    return [range(max(n * size, first), max(n * size, first, min((n + 1) * size, end))) for n in range(count)]


def tile_of(shape: Shape, dtype: torch.dtype) -> tuple[int, int]:
    """Queries and keys per tile of the forward."""
    row = dtype.itemsize * next(dim for dim in (64, 128, 256) if shape.dim <= dim)
    return (128, 64) if row < 256 else (2**15 // row, 2**14 // row)


def tensors(shape: Shape, dtype: torch.dtype) -> dict[str, Moved]:
    """What our forward or decode moves of query, key, value and out."""
    row = shape.dim * dtype.itemsize
    rows = shape.batch * shape.heads * shape.queries * row
    if is_decode(shape):
        splits = split_ranges(shape)
        tall = shape.group * shape.queries
        blocks = ceil_div(tall, 16 if tall <= 16 else 32)  # blocks that read the same keys
        keys = shape.batch * shape.heads_kv * sum(map(len, splits)) * row
        used = max(1, sum(len(split) > 0 for split in splits))
        query, keys_moved = Moved(used * rows, rows), Moved(blocks * keys, keys)
    else:
        tile_queries, tile_keys = tile_of(shape, dtype)
        asked = distinct = seen = queries = 0  # rows
        for i0 in range(0, shape.queries, tile_queries):
            i1 = min(i0 + tile_queries, shape.queries)
            begin, end = shape.first(i0) // tile_keys * tile_keys, shape.end(i1 - 1)
            if end <= begin:
                continue
            end = min(begin + ceil_div(end - begin, tile_keys) * tile_keys, shape.keys)
            asked += end - begin
            distinct += max(0, end - max(begin, seen))
            seen = max(seen, end)
            queries += i1 - i0
        query = once(shape.batch * shape.heads * queries * row)
        keys_moved = Moved(shape.batch * shape.heads * asked * row, shape.batch * shape.heads_kv * distinct * row)
    return {"query": query, "key": keys_moved, "value": keys_moved, "out": once(rows)}
