"""Keys in splits: partial states and their merge give what one pass over all keys gives."""

from functools import partial

import pytest
import torch
from torch import inf, nan
from torch.testing import assert_close

from cases import Case
from checks import assert_same_bits, check_backward, check_forward
from flashsoftmax import attention, merge

ROWS = pytest.mark.parametrize("rows", [1, 2, 16, 17, 40])


@ROWS
@pytest.mark.parametrize("split_size", [1, 1024, 1500, 2499, 2500, 2501, 10**9, 2**62])
def test_any_split_size(split_size, rows, dtype, device):
    sizes = {"batch": 2, "heads": (6, 2), "rows": rows, "keys": 2500, "dim": 8, "kv_lens": (2500, 1100)}
    case = Case("", **sizes, causal=True, sinks=True, split_size=split_size)
    check_forward(case.call(attention), partial(case.inputs, dtype, device))


@pytest.mark.parametrize("split_size", [1, 1250])
def test_backward(split_size, dtype):
    sizes = {"batch": 2, "heads": (4, 2), "rows": 2, "keys": 2500, "dim": 8, "kv_lens": (2500, 1100)}
    case = Case("", **sizes, sinks=True, split_size=split_size)
    check_backward(case.call(attention), partial(case.inputs, dtype))


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 1023, 1024, 1025, 2047, 2048, 2049, 2100])
@pytest.mark.parametrize("rows", [2, 20])
def test_lengths_at_the_bounds_of_splits(rows, length, dtype):
    case = Case("", rows=rows, keys=2100, dim=8, kv_lens=(length,), split_size=128)
    check_forward(case.call(attention), partial(case.inputs, dtype))


@pytest.mark.parametrize("keys", [1023, 1024, 1025, 2049, 5000])
def test_default_split_size(keys, dtype):
    case = Case("", rows=1, keys=keys, dim=16)
    check_forward(case.call(attention), partial(case.inputs, dtype))


@pytest.mark.parametrize("keys", [100, 5000])
def test_most_splits_are_empty(keys, dtype):
    """A window of 8, and the memory of the partial states held NaN before."""
    case = Case("", rows=1, keys=keys, dim=16, window=(8, 0), split_size=3)
    inputs = case.inputs(dtype)
    dirty = [torch.full((n,), nan) for n in range(16, 4096, 16)]
    del dirty
    out, _ = case.call(attention)(**inputs)
    check_forward(case.call(attention), inputs)
    eps = torch.finfo(dtype).eps
    assert_close(out, attention(**inputs, split_size=keys), rtol=2 * eps, atol=eps)


def test_merging_with_empty_states_is_exact():
    inputs = Case("", rows=1, keys=5000, dim=16, window=(8, 0)).inputs(torch.float32)
    assert_same_bits(attention(**inputs, split_size=1024), attention(**inputs, split_size=5000))


def test_a_sink_counts_once():
    keys = torch.zeros(1, 1, 4096, 8)
    for split_size in (1, 2048, 4096):
        for rows in (1, 40):
            options = {"sinks": torch.tensor([6.0]), "split_size": split_size, "return_lse": True}
            out, lse = attention(keys[:, :, :rows], keys, keys + 1, **options)
            total = 4096 + torch.tensor(6.0).exp()
            assert_close(lse, total.log().expand_as(lse))
            assert_close(out, (4096 / total).expand_as(out))


@ROWS
@pytest.mark.parametrize("at", [0, 17, 127, 128, 1023, 1024, 1500, 2047, 2048, 2099])
def test_the_largest_score_anywhere(at, rows, dtype):
    """Where an accumulator is not rescaled with its sum, one of these is wrong."""
    case = Case("", rows=rows, keys=2100, dim=8, split_size=128)

    def inputs():
        inputs = case.inputs(dtype)
        inputs["query"][..., 0], inputs["key"][..., 0] = 5, 0
        inputs["key"][:, :, at, 0] = 8
        return inputs

    check_forward(case.call(attention), inputs)


@ROWS
def test_parts_made_by_hand_merge_to_the_whole(rows, dtype):
    """Attention over parts of the keys, wherever they are cut, and merge."""
    case = Case("", batch=2, heads=(4, 2), rows=rows, keys=90, dim=24, causal=True)

    def in_parts(query, key, value, causal, **options):
        states = []
        for begin, end in ((0, 10), (10, 11), (11, 60), (60, 90)):
            options["q_offset"] = key.shape[2] - query.shape[2] - begin
            part = query, key[:, :, begin:end], value[:, :, begin:end]
            states.append(attention(*part, causal=causal, **options, return_lse=True))
        return merge(*zip(*states, strict=True))

    check_forward(in_parts, partial(case.inputs, torch.float32))
    check_backward(in_parts, partial(case.inputs, torch.float32))
    half, eps = case.inputs(dtype), torch.finfo(dtype).eps
    assert_close(in_parts(**half)[0], attention(**half), rtol=4 * eps, atol=2 * eps)


def test_splits_that_no_row_sees_are_empty():
    for rows in (2, 20):
        inputs = Case("", rows=rows, keys=2100, dim=8, causal=True, q_offset=-30).inputs(torch.float32)
        out, lse = attention(**inputs, split_size=128, return_lse=True)
        assert not out.any() and (lse == -inf).all()
