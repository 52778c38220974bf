"""The model of what ranks send and compute: against the bytes of real ranks, and its formulas against its routes."""

import sys
from collections import Counter
from itertools import accumulate, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("torch has no distributed", allow_module_level=True)
pytest.importorskip("matplotlib")  # before what needs it

sys.path.append(str(Path(__file__).parents[1]))

import ranks
from bench import report, scaling
from bench.support.roofs import GPUS, INFINIBAND, NVLINK
from bench.support.scaling_model import Fabric, Step, Work, formula, hops, pairs, seconds, sent, steps, visible, worst
from flashsoftmax.distributed import context_attention, shard_plan
from flashsoftmax.distributed.layout import UNBOUNDED, Band, Layout

CAUSAL = Band(UNBOUNDED, 0)
ONE_NODE = 1 << 20


# Against the bytes that real ranks send


def messages():
    """Counts the bytes that this process sends, by receiver."""
    counted, batch = Counter(), dist.batch_isend_irecv

    def counting(ops):
        for op in ops:
            if op.op is dist.isend:
                counted[op.group_peer] += op.tensor.numel() * op.tensor.element_size()
        return batch(ops)

    dist.batch_isend_irecv = counting
    return counted


def gathered(counted):
    """{(sender, receiver): bytes} of all ranks."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, dict(counted))
    return {(sender, receiver): size for sender, x in enumerate(found) for receiver, size in x.items() if size}


def cases(n):
    """(lengths, whether they are packed, method, band, layout, heads, heads_kv, dtype)."""
    methods = ["ring", "gather", "ulysses", *([(2, 2)] if n == 4 else [])]
    bands = [CAUSAL, Band(20, 0), Band(), Band(7, 3)]
    for method, band, layout in product(methods, bands, ("zigzag", "contiguous")):
        yield (61,), False, method, band, layout, 8, 2, torch.bfloat16
        yield (1, 7, 2 * n - 1, 0, 130), True, method, band, layout, 8, 2, torch.float32
    for method in methods:
        yield (40, 3), True, method, CAUSAL, "zigzag", 12, 4, torch.bfloat16  # heads that do not divide
        yield (1,), False, method, CAUSAL, "zigzag", 4, 1, torch.float64  # empty ranks


def check_bytes(n):
    counted = messages()
    for lengths, packed, method, band, layout, heads, heads_kv, dtype in cases(n):
        length = {"cu_seqlens": [0, *accumulate(lengths)]} if packed else {"seq_len": sum(lengths)}
        plan = shard_plan(**length, layout=layout, method=method)
        work = Work(
            plan.layout, band, heads, heads_kv, 8, dtype, 1 if packed else 2, plan.ulysses, gather=method == "gather"
        )
        shapes = [(h, plan.rows[plan.rank], 8) for h in (heads, heads_kv, heads_kv)]
        shapes = [(rows, h, dim) if packed else (2, h, rows, dim) for h, rows, dim in shapes]
        q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
        window = [None if x == UNBOUNDED else x for x in (band.left, band.right)]

        counted.clear()
        out = context_attention(q, k, v, plan, window=tuple(window))
        found = [gathered(counted)]
        counted.clear()
        out.float().sum().backward()
        found.append(gathered(counted))
        assert found == [dict(sent(work, backward)) for backward in (False, True)], (plan, lengths, band, dtype)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_bytes_are_those_of_real_ranks(n):
    ranks.run(n, check_bytes, n)


# The model


def work(tokens, holders, left=None, **options):
    """The case of the benchmark, in small."""
    layout, band = ("zigzag", CAUSAL) if left is None else ("contiguous", Band(left, 0))
    return Work(Layout((tokens,), holders, layout), band, 32, 8, 16, torch.bfloat16, **options)


@pytest.mark.parametrize("ulysses", [1, 2, 8])
@pytest.mark.parametrize("node", [1, 8, ONE_NODE])
@pytest.mark.parametrize("left", [None, 0, 1, 63, 100, 512])
def test_formulas_are_the_routes(left, node, ulysses):
    for holders, gather, is_gradient in product((1, 2, 4, 8, 16, 32), (False, True), (False, True)):
        x = work(1024, holders, left, ulysses=ulysses, gather=gather)
        routed = {t: worst(m, node) for t, m in hops(x, is_gradient).items()}
        assert formula(x, node, is_gradient) == routed, (holders, gather, is_gradient)
        assert pairs(x, range(holders)) == pairs(x, [holders - 1])


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_with_a_window_bytes_do_not_grow_with_the_sequence(layout, gather):
    def most(tokens, band):
        x = Work(Layout((tokens,), 4, layout), band, 8, 2, 16, torch.bfloat16, gather=gather)
        return [max(sum(size for (s, _), size in sent(x, b).items() if s == rank) for rank in range(4)) for b in (0, 1)]

    row = 2 * 2 * 16 * 2  # K and V, 2 heads of 16 elements of 2 bytes
    assert most(1000, Band(50, 0)) == most(10_000, Band(50, 0)) == most(1_000_000, Band(50, 0))
    assert most(10_000, Band(50, 0))[0] <= 2 * 50 * row  # two chunks in zigzag
    assert most(10_000, Band(100, 0)) == [2 * x for x in most(10_000, Band(50, 0))]
    assert most(10_000, CAUSAL)[0] == 10 * most(1000, CAUSAL)[0]


def test_pairs_are_counted_exactly():
    bands = [Band(), CAUSAL, Band(3, 0), Band(0, 0), Band(2, 5), Band(UNBOUNDED, 4), Band(6)]
    layout = Layout((13, 2, 30), 3)
    segments = [s for x in layout.segments for s in x]
    for band, query, key in product(bands, segments, segments):
        seen = [
            query.document == key.document and i - band.left <= j <= i + band.right
            for i, j in product(range(query.start, query.end), range(key.start, key.end))
        ]
        assert visible(band, query, key) == sum(seen)


def test_all_methods_compute_the_same():
    """Per rank, since causal zigzag is balanced."""
    whole = work(1024, 1)
    total = sum(pairs(whole, [0]).values())
    for gather in (False, True):
        found = pairs(work(1024, 8, gather=gather), range(8))
        assert sum(found.values()) * 8 == total
    assert sum(s.pairs for s in steps(work(1024, 1, ulysses=8), ONE_NODE, False)) == total  # of 4 heads, not of 32


def test_a_step_takes_as_long_as_its_longer_side():
    x, gpu, fabric = work(1024, 8), GPUS[2], Fabric("", 8)
    peak = gpu.peak["bfloat16"]
    flops = 1000 * 32 * 4 * 16
    assert seconds(x, Step(1000), False, fabric, gpu) == flops / peak
    assert seconds(x, Step(1000), True, fabric, gpu) == 2.5 * flops / peak
    assert seconds(x, Step(1, 10**6), False, fabric, gpu) == NVLINK.latency + 10**6 / 450e9
    assert seconds(x, Step(1, 10**6, True), False, fabric, gpu) == INFINIBAND.latency + 10**6 / 50e9
    assert seconds(x, Step(10**12, 1), False, fabric, gpu) == 10**12 * 32 * 4 * 16 / peak


def test_the_slowest_link_counts():
    inside, between = {(0, 1): 5, (1, 0): 7, (2, 1): 1}, {(1, 2): 3, (0, 3): 1, (1, 3): 1}
    assert worst(inside, 4) == (7, False)
    assert worst(inside | between, 4) == (11, False)  # rank 1 sends 7 + 3 + 1
    assert worst(inside | between, 2) == (4, True)  # rank 1 sends 3 + 1
    assert worst({}, 2) == (0, False)


def test_the_command_and_its_page(tmp_path, capsys):
    scaling.main(["--quick", "--out", str(tmp_path)])
    for kind in ("csv", "json", "png", "svg"):
        assert (tmp_path / f"scaling-model.{kind}").exists()
    page = report.report(tmp_path)
    assert "no GPU has run this" in page and f"{tmp_path.name}/scaling-model.svg" in page
