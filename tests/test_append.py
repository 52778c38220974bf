"""append_kv writes new keys and values into a cache, rotary rotates queries: the operators behind a KV cache."""

import pytest
import torch
from torch.library import opcheck

from cases import LAYOUTS, NAN
from checks import assert_accurate, assert_same_bits
from flashsoftmax import ops
from test_gpu import ON_GPU

OPERATOR = "append_kv"
ROTARY = [None, "interleaved", "halves"]


def on_interpreter(dtype=None, layout="contiguous", **_):
    return dtype != torch.bfloat16 and layout in ("contiguous", "heads-in-rows", "every-other-element")


def rotated(x, cos, sin, positions, interleaved):
    """x [B, H, S, D], whose row i of sequence b is at position positions[b, i]."""
    if cos is None:
        return x
    cos, sin = (table.to(x.dtype)[positions].unsqueeze(1) for table in (cos, sin))
    pairs = cos.shape[-1]
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(pairs), None)
    second = second or slice(pairs, 2 * pairs)
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def tables(rotary, positions, pairs, dtype=torch.float32, device="cpu"):
    """The arguments about rotary embedding."""
    if rotary is None:
        return {"rotary_cos": None, "rotary_sin": None, "rotary_interleaved": True}
    angles = (7 * torch.rand(positions, pairs)).to(device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary == "interleaved"}


def rotate(x, arguments, positions):
    return rotated(
        x, arguments["rotary_cos"], arguments["rotary_sin"], positions.cpu(), arguments["rotary_interleaved"]
    )


def batch(dtype, device="cpu", rows=3, dim=18, value_dim=10, lens=(0, 7, 4), layout="contiguous"):
    """key, value and kv_lens"""
    size = len(lens), 2, rows
    key, value = (LAYOUTS[layout](torch.randn(*size, d).to(device, dtype)) for d in (dim, value_dim))
    return key, value, torch.tensor(lens, dtype=torch.int64, device=device)


def caches(key, value, slots, rows, layout="contiguous"):
    sizes = (slots, key.shape[1], rows)
    return [LAYOUTS[layout](x.new_full((*sizes, x.shape[3]), NAN)) for x in (key, value)]


def check_written(found, cache_before, where, expected, naive):
    """found holds `expected` at the indices [(slot, row)] in `where`, and what it held before elsewhere."""
    slots, rows = where
    new = found.transpose(1, 2)[slots, rows]
    assert_accurate("new rows", new, expected.transpose(1, 2).flatten(0, 1), naive.transpose(1, 2).flatten(0, 1))
    rest = found.clone()
    rest.transpose(1, 2)[slots, rows] = cache_before.transpose(1, 2)[slots, rows]
    assert_same_bits(rest, cache_before)


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("layout", ["contiguous", "heads-in-rows", "every-other-element", "dim-not-last"])
def test_new_rows_and_nothing_else_are_written(rotary, paged, layout, dtype, device):
    key, value, lens = batch(dtype, device, layout=layout)
    positions = lens[:, None] + torch.arange(3, device=device)
    if paged:
        page_size, table = 4, torch.tensor([[5, -1, 9], [-1, 2, 0], [10**6, 3, -7]], device=device)
        key_cache, value_cache = caches(key, value, 7, page_size, layout)
        slots, rows = table.gather(1, positions // page_size), positions % page_size
    else:
        table = None
        key_cache, value_cache = caches(key, value, 4, 10, layout)
        slots, rows = torch.arange(3, device=device)[:, None].expand(3, 3), positions
    before = key_cache.clone(), value_cache.clone()
    arguments = tables(rotary, 12, 6, dtype, device)
    ops.append_kv(key_cache, value_cache, key, value, kv_lens=lens, block_table=table, **arguments)
    where = slots.flatten(), rows.flatten()
    exact, naive = (rotate(x, arguments, positions) for x in (key.double(), key))
    check_written(key_cache, before[0], where, exact, naive)
    check_written(value_cache, before[1], where, value.double(), value)


@pytest.mark.parametrize("same_position", [False, True], ids=["positions", "same-position"])
@pytest.mark.parametrize("table_dtype", ["float32", "of-rows"])
@pytest.mark.parametrize("rotary", ROTARY[1:])
def test_rotary(same_position, table_dtype, rotary, dtype, device):
    query, _, lens = batch(dtype, device, rows=5, dim=20)
    arguments = tables(rotary, 12, 6, torch.float32 if table_dtype == "float32" else dtype, device)
    steps = torch.arange(5, device=device) * (not same_position)
    out = ops.rotary(query, **arguments, positions=lens, same_position=same_position)
    exact, naive = (rotate(x, arguments, lens[:, None] + steps) for x in (query.double(), query))
    assert_accurate("query", out, exact, naive)


@pytest.mark.parametrize("rotary", ROTARY)
def test_float64(rotary):
    key, value, lens = batch(torch.float64)
    key_cache, value_cache = caches(key, value, 3, 10)
    arguments = tables(rotary, 12, 9, torch.float64)
    ops.append_kv(key_cache, value_cache, key, value, kv_lens=lens.int(), **arguments)
    positions = lens[:, None] + torch.arange(3)
    found = key_cache.transpose(1, 2)[torch.arange(3)[:, None], positions].transpose(1, 2)
    torch.testing.assert_close(found, rotate(key, arguments, positions), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("sizes", [{"rows": 0}, {"dim": 0, "value_dim": 0}, {"lens": ()}], ids=str)
def test_empty(sizes, dtype, device):
    key, value, lens = batch(dtype, device, **sizes)
    key_cache, value_cache = caches(key, value, 3, 10)
    before = key_cache.clone(), value_cache.clone()
    ops.append_kv(key_cache, value_cache, key, value, kv_lens=lens)
    assert_same_bits((key_cache, value_cache), before)
    assert ops.rotary(key, **tables("halves", 12, 0, dtype, device), positions=lens, same_position=False).equal(key)


TABLE = torch.tensor([[5, 0, 1], [3, 2, 4], [6, 7, 8]])
BAD = {
    "negative length": ({"kv_lens": torch.tensor([0, -1, 4])}, r"kv_lens\[1\]: -1, wanted 0 to 9"),
    "no room": ({"kv_lens": torch.tensor([0, 7, 10])}, r"kv_lens\[2\]: 10, wanted 0 to 9"),
    "far beyond": ({"kv_lens": torch.tensor([2**63 - 1, 7, 4])}, r"kv_lens\[0\]: \d+, wanted 0 to 9"),
    "missing page": ({"block_table": TABLE.masked_fill(TABLE == 4, 9)}, r"block_table\[1, 2\]: page 9, wanted 0 to 8"),
    "negative page": ({"block_table": TABLE.masked_fill(TABLE == 7, -1)}, r"block_table\[2, 1\]: page -1"),
    "short tables": (tables("halves", 9, 6), r"kv_lens\[1\]: 7, wanted 0 to 6, the positions that rotary_cos has"),
    "no tables": (tables("halves", 0, 6), r"kv_lens\[0\]: 0, wanted 0 to -3"),
    "one table": (tables("halves", 12, 6) | {"rotary_sin": None}, "rotary_cos, rotary_sin: one of them is missing"),
    "wide tables": (tables("halves", 12, 10), "rotary_cos: 10 columns, wanted at most half of head_dim, 18"),
    "tables of another dtype": (tables("halves", 12, 6, torch.float16), "rotary_cos: dtype float16, wanted float32"),
    "rows of the table": ({"block_table": TABLE[:2]}, "block_table: 2 rows, wanted the batch, 3"),
    "dtype": ({"value": torch.zeros(3, 2, 3, 10, dtype=torch.float16)}, "value: dtype float16"),
    "heads": ({"key_cache": torch.zeros(9, 1, 4, 18)}, "key_cache: shape"),
    "expanded": ({"key_cache": torch.zeros(9, 1, 4, 18).expand(9, 2, 4, 18)}, "key_cache: axis 1 is expanded"),
    "lengths": ({"kv_lens": torch.tensor([1, 2])}, "kv_lens: shape"),
}


@pytest.mark.parametrize("bad", BAD)
def test_an_error_comes_before_anything_is_written(bad):
    key, value, lens = batch(torch.float32)
    key_cache, value_cache = caches(key, value, 9, 4)
    arguments = {"key_cache": key_cache, "value_cache": value_cache, "key": key, "value": value}
    arguments |= {"kv_lens": lens, "block_table": TABLE} | tables("halves", 12, 6)
    ops.append_kv(**{name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()})
    changed, message = BAD[bad]
    with pytest.raises((ValueError, RuntimeError), match=message):
        ops.append_kv(**arguments | changed)
    assert key_cache.isnan().all() and value_cache.isnan().all()


def test_a_contiguous_cache_has_room_and_batch():
    key, value, lens = batch(torch.float32)
    key_cache, value_cache = caches(key, value, 3, 9)
    with pytest.raises(ValueError, match=r"kv_lens\[1\]: 7, wanted 0 to 6, so that the new keys fit into the cache"):
        ops.append_kv(key_cache, value_cache, key, value, kv_lens=lens)
    with pytest.raises(ValueError, match="key_cache: batch 2, wanted at least that of key, 3"):
        ops.append_kv(key_cache[:2], value_cache[:2], key, value, kv_lens=lens)
    assert key_cache.isnan().all() and value_cache.isnan().all()


@pytest.mark.parametrize("positions", [(0, 8, 3), (-1, 0, 0)], ids=str)
def test_rotary_refuses_positions_that_the_tables_do_not_have(positions):
    query = torch.randn(3, 2, 5, 16)
    with pytest.raises(ValueError, match=r"positions\[[01]\]: (8|-1), wanted 0 to 7"):
        ops.rotary(query, **tables("halves", 12, 6), positions=torch.tensor(positions), same_position=False)


@ON_GPU
def test_rows_without_a_place_are_not_written_on_a_gpu(device):
    """There the host does not read lengths. A row that has a place but no position in the tables becomes NaN."""
    key, value, _ = batch(torch.float32, device, lens=(0,) * 6)
    lens = torch.tensor([0, -1, 10, 2**40, 6, 2], device=device)
    table = torch.tensor([[0, 1, 1], [2, 2, 2], [3, 3, 3], [4, 4, 4], [5, 9, -1], [6, 7, 8]], device=device)
    key_cache, value_cache = caches(key, value, 9, 4)
    key_cache.zero_(), value_cache.zero_()
    ops.append_kv(
        key_cache, value_cache, key, value, kv_lens=lens, block_table=table, **tables("halves", 4, 9, device=device)
    )
    written = (value_cache != 0).any(-1).any(1)
    expected = torch.zeros(9, 4, dtype=torch.bool, device=device)
    expected[0, :3] = expected[6, 2:] = expected[7, :1] = True
    assert written.equal(expected)
    nan = torch.zeros_like(expected)
    nan[7, :1] = True
    assert key_cache.isnan().any(-1).any(1).equal(nan)
    query = ops.rotary(key, **tables("halves", 4, 9, device=device), positions=lens, same_position=False)
    assert (
        query.isnan()
        .any(-1)
        .any(1)
        .equal(torch.tensor([[0, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 1]], device=device).bool())
    )


class TestPyTorch:
    def test_opcheck(self):
        key, value, lens = batch(torch.float32)
        key_cache, value_cache = torch.zeros(3, 2, 10, 18), torch.zeros(3, 2, 10, 10)
        arguments = tables("halves", 12, 6)
        append = key_cache, value_cache, key, value, lens, None, *arguments.values()
        opcheck(torch.ops.flashsoftmax.append_kv.default, append)
        append = key_cache[:, :, :4], value_cache[:, :, :4], key[:1], value[:1], lens[:1], TABLE[:1] % 3, None, None
        opcheck(torch.ops.flashsoftmax.append_kv.default, (*append, True))
        cos, sin, interleaved = arguments.values()
        opcheck(torch.ops.flashsoftmax.rotary.default, (key, cos, sin, lens, interleaved, False))

    def test_there_is_no_gradient_and_that_is_said(self):
        key, value, lens = batch(torch.float32)
        key_cache, value_cache = caches(key, value, 3, 10)
        key.requires_grad_()
        with pytest.raises(NotImplementedError, match="append_kv has no gradient"):
            ops.append_kv(key_cache, value_cache, key, value, kv_lens=lens)
        assert key_cache.isnan().all()
        with pytest.raises(NotImplementedError, match="rotary has no gradient"):
            ops.rotary(key, **tables("halves", 12, 6), positions=lens, same_position=True)
        with torch.no_grad():
            ops.append_kv(key_cache, value_cache, key, value, kv_lens=lens)
        assert not key_cache.isnan().all()

    def test_autograd_sees_that_the_cache_was_written(self):
        key, value, lens = batch(torch.float32)
        key_cache, value_cache = torch.zeros(3, 2, 10, 18), torch.zeros(3, 2, 10, 10)
        weight = torch.ones(18, requires_grad=True)
        product = (key_cache * weight).sum()
        ops.append_kv(key_cache, value_cache, key, value, kv_lens=lens)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
