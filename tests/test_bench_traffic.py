"""What the traffic benchmark predicts: against numbers made by hand, and against what the real kernels move."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))

from bench.support import counted, watched
from bench.support.once import task
from bench.support.roofs import GPUS, Roof
from bench.support.shapes import Shape
from bench.support.traffic_model import PIPELINES, Moved, matmul, ours, split_ranges, two_pass, unfused

BF16 = torch.bfloat16
STATISTICS = ("lse", "lse_error")
MIB = 2**20


def total(kernels):
    return sum(kernel.distinct for kernel in kernels)


def test_unfused_writes_and_reads_two_matrices():
    """The README's 128 MiB a head at 8,192 tokens: S and P, each written and read; Q, K, V and O of 2 MiB."""
    kernels = unfused(Shape("forward", 1, 1, 1, 8192, 8192, 128), BF16)
    assert total(kernels) == 4 * 128 * MIB + 4 * 2 * MIB
    assert [kernel.name for kernel in kernels] == ["scores", "softmax", "output"]
    assert kernels[1].asked == kernels[1].distinct == 2 * 128 * MIB
    assert sum(kernel.flops for kernel in kernels) == 4 * 8192 * 8192 * 128


def test_forward_reads_what_tiles_see():
    """Two tiles of 128 queries; tiles of 64 keys, of which the first queries see 2 and the second 4."""
    causal = Shape("forward", 1, 1, 1, 256, 256, 64, True)
    (kernel,) = ours(causal, BF16)
    row = 64 * 2
    assert kernel.reads == {
        "query": Moved(256 * row, 256 * row),
        "key": Moved((128 + 256) * row, 256 * row),
        "value": Moved((128 + 256) * row, 256 * row),
    }
    assert kernel.writes == {"out": Moved(256 * row, 256 * row)} | dict.fromkeys(STATISTICS, Moved(256 * 4, 256 * 4))


def test_forward_reads_heads_once_for_each_query_head():
    full = Shape("forward", 3, 8, 2, 100, 70, 64)
    (kernel,) = ours(full, BF16)
    assert kernel.reads["key"] == Moved(3 * 8 * 70 * 128, 3 * 2 * 70 * 128)
    assert two_pass(full, BF16)[0].flops + two_pass(full, BF16)[1].flops == 1.5 * full.flops


def test_window_is_read_once_and_hidden_keys_never():
    """Query 0 of the second tile of 128 sees keys from 118 on, so its tiles of 64 begin at 64."""
    windowed = Shape("forward", 1, 1, 1, 256, 256, 64, True, 10)
    (kernel,) = ours(windowed, BF16)
    assert kernel.reads["key"] == Moved((128 + 192) * 128, 256 * 128)
    assert windowed.visible == sum(min(i, 10) + 1 for i in range(256))
    far = Shape("forward", 1, 1, 1, 128, 1024, 64, True, 10)
    assert ours(far, BF16)[0].reads["key"] == Moved((1024 - 832) * 128, (1024 - 832) * 128)


def test_queries_that_see_nothing_are_not_read():
    (kernel,) = ours(Shape("forward", 1, 1, 1, 300, 40, 64, True), BF16)
    assert kernel.reads["query"] == Moved(44 * 128, 44 * 128)  # 260 see nothing: two tiles of 128 wholly
    assert kernel.writes["out"] == Moved(300 * 128, 300 * 128)


def test_decode_leaves_states_for_the_merge():
    """2,100 keys are three splits of 1,024; 4 query heads share them. 16 lanes of a row all read its states."""
    shape = Shape("decode", 1, 4, 1, 1, 2100, 64)
    assert [len(keys) for keys in split_ranges(shape)] == [1024, 1024, 52]
    split, merge = ours(shape, BF16)
    assert split.reads["key"] == Moved(2100 * 128, 2100 * 128)
    assert split.reads["query"] == Moved(3 * 4 * 128, 4 * 128)
    assert split.writes == {"states": Moved(3 * 4 * 8, 3 * 4 * 8), "acc": Moved(3 * 4 * 256, 3 * 4 * 256)}
    assert merge.reads == {"states": Moved(16 * 3 * 4 * 8, 3 * 4 * 8), "acc": Moved(3 * 4 * 256, 3 * 4 * 256)}
    assert merge.writes == {"out": Moved(4 * 128, 4 * 128)} | dict.fromkeys(STATISTICS, Moved(16, 16))


def test_decode_in_one_split_needs_no_merge():
    (kernel,) = ours(Shape("decode", 2, 8, 2, 1, 1000, 128), BF16)
    assert kernel.writes == {"out": Moved(2 * 8 * 256, 2 * 8 * 256)} | dict.fromkeys(STATISTICS, Moved(64, 64))


def test_matmul_asks_for_a_tile_again_for_each_block():
    assert matmul(256, 300, 64) == (256 * 64 * 3, 64 * 300 * 2)


def test_nothing_moves_less_than_each_byte_once():
    for kind in ("full", "causal", "windowed", "decode"):
        shape = Shape("forward", 1, 4, 2, 700, 900, 64, kind != "full", 200 if kind == "windowed" else None)
        if kind == "decode":
            shape = Shape("decode", 1, 4, 2, 1, 900, 64)
        for kernels in PIPELINES.values():
            for kernel in kernels(shape, torch.float32):
                for moved in (*kernel.reads.values(), *kernel.writes.values()):
                    assert moved.asked >= moved.distinct > 0


def test_ridge_and_floor():
    roof = Roof("a", 2e12, {"bfloat16": 300e12}, "")
    assert roof.ridge("bfloat16") == 150
    assert roof.side(149, "bfloat16") == "memory" and roof.side(151, "bfloat16") == "arithmetic"
    assert roof.floor(2e12, 0, "bfloat16") == 1 and roof.floor(0, 600e12, "bfloat16") == 2
    assert [round(gpu.ridge("bfloat16")) for gpu in GPUS] == [153, 295, 206, 281]


def test_peak_memory_sees_what_is_written():
    """Naive float32 attention writes S and P, of 16 MiB each."""
    shape = Shape("forward", 1, 1, 1, 2048, 2048, 16)
    naive, fused = (watched.peak_memory(task(shape, "float32", name, "cpu", 1)) for name in ("naive", "flashsoftmax"))
    assert naive.absent is fused.absent is None
    assert naive.bytes > 24 * MIB > 8 * MIB > fused.bytes


@pytest.mark.skipif(counted.unavailable() is not None, reason=f"no interpreter: {counted.unavailable()}")
@pytest.mark.parametrize("case", counted.cases(False), ids=lambda case: f"{case[1]} {case[0]}")
def test_model_agrees_with_the_kernels_to_the_byte(case):
    kernels = counted.count(*case)
    assert kernels
    for kernel in kernels:
        counts = {name: value for name, value in kernel.items() if name.startswith("counted")}
        assert counts == {name.replace("model", "counted"): kernel[name] for name in kernel if name.startswith("model")}
        assert kernel["agree"]
        assert kernel["sectors"] >= kernel["ideal_sectors"] >= math.ceil(kernel["counted_distinct_read"] / 32)
