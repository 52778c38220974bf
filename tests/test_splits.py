"""Keys in splits: partial states and their merge give what one pass over all keys gives."""

import pytest
import torch
from torch import inf, nan
from torch.testing import assert_close

from cases import Case
from checks import assert_same_bits, check_backward, check_forward
from flashsoftmax import attention, merge

ROWS = pytest.mark.parametrize("rows", [1, 2, 16, 17, 40])


@ROWS
@pytest.mark.parametrize("split_size", [1, 7, 32, 99, 100, 101, 10**9])
def test_any_split_size(split_size, rows, dtype, device):
    case = Case(
        "",
        batch=2,
        heads=(6, 2),
        rows=rows,
        keys=100,
        dim=24,
        causal=True,
        sinks=True,
        kv_lens=(100, 64),
        split_size=split_size,
    )
    check_forward(case.call(attention), case.inputs(dtype, device))


@pytest.mark.parametrize("split_size", [1, 16, 50])
def test_backward(split_size, dtype):
    case = Case(
        "",
        batch=2,
        heads=(4, 2),
        rows=2,
        keys=100,
        dim=24,
        sinks=True,
        kv_lens=(100, 64),
        split_size=split_size,
    )
    check_backward(case.call(attention), case.inputs(dtype))


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 33, 48])
def test_lengths_at_the_bounds_of_splits(length, dtype):
    case = Case("", rows=2, keys=48, dim=24, kv_lens=(length,), split_size=16)
    check_forward(case.call(attention), case.inputs(dtype))


@pytest.mark.parametrize("keys", [2047, 2048, 2049, 5000])
def test_default_split_size(keys, dtype):
    case = Case("", rows=1, keys=keys, dim=16)
    check_forward(case.call(attention), case.inputs(dtype))


def test_most_splits_are_empty(dtype):
    """A window of 8 over 100 keys in 34 splits, where the memory of the partial states held NaN before."""
    case = Case("", rows=1, keys=100, dim=16, window=(8, 0), split_size=3)
    inputs = case.inputs(dtype)
    dirty = [torch.full((34 * n,), nan) for n in (1, 2, 4, 16, 17, 18, 32, 36, 64)]
    del dirty
    out, _ = check_forward(case.call(attention), inputs)
    eps = torch.finfo(dtype).eps
    assert_close(out, attention(**inputs, split_size=100), rtol=2 * eps, atol=eps)


def test_the_window_in_one_split_has_the_bits_of_that_split():
    """Merging with empty states is exact."""
    inputs = Case("", rows=1, keys=100, dim=16, window=(8, 0)).inputs(torch.float32)
    assert_same_bits(attention(**inputs, split_size=50), attention(**inputs, split_size=75 + 5))


def test_a_sink_counts_once():
    keys = torch.zeros(1, 1, 64, 8)
    for split_size in (1, 16, 64):
        out, lse = attention(
            keys[:, :, :1], keys, keys + 1, sinks=torch.tensor([4.0]), split_size=split_size, return_lse=True
        )
        total = 64 + torch.tensor(4.0).exp()
        assert_close(lse, total.log().expand_as(lse))
        assert_close(out, (64 / total).expand_as(out))


@ROWS
def test_the_largest_score_in_each_split(rows, dtype):
    """Where a split's accumulator is not rescaled, one of these is wrong."""
    for at in (0, 17, 40, 63):
        inputs = Case("", rows=rows, keys=64, dim=24).inputs(dtype)
        inputs["query"][..., 0], inputs["key"][..., 0] = 5, 0
        inputs["key"][:, :, at, 0] = 20
        check_forward(lambda **inputs: attention(**inputs, split_size=16, return_lse=True), inputs)


@ROWS
def test_splits_made_by_hand_merge_to_the_whole(rows, dtype):
    """Attention over parts of the keys, wherever they are, and merge."""
    case = Case("", batch=2, heads=(4, 2), rows=rows, keys=90, dim=24, causal=True)

    def in_parts(query, key, value, causal, **options):
        options["q_offset"] = key.shape[2] - query.shape[2]
        parts = [(0, 10), (10, 11), (11, 60), (60, 90)]
        states = []
        for begin, end in parts:
            k, v = key[:, :, begin:end], value[:, :, begin:end]
            shifted = options | {"q_offset": options["q_offset"] - begin}
            states.append(attention(query, k, v, causal=causal, **shifted, return_lse=True))
        return merge(*zip(*states, strict=True))

    inputs = case.inputs(torch.float32)
    check_forward(in_parts, inputs)
    check_backward(in_parts, inputs)
    half = case.inputs(dtype)
    for a, b in zip(in_parts(**half), attention(**half, return_lse=True), strict=True):
        assert_close(a, b, rtol=4 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


def test_a_part_that_no_row_sees_is_empty():
    inputs = Case("", rows=2, keys=20, dim=8, causal=True, q_offset=-30).inputs(torch.float32)
    out, lse = attention(**inputs, split_size=4, return_lse=True)
    assert not out.any() and (lse == -inf).all()
