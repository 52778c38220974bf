"""Keys and values in pages, found through a block table, against dense attention on what the pages hold."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch

import reference
from cases import NAN, Case
from checks import assert_same_bits, check_forward, is_real
from flashsoftmax import attention, attention_paged, attention_varlen
from test_varlen import offsets


def paged(inputs, lens, page_size, *, unused=-1, spare=2):
    """The same keys and values in shuffled pages. Unused slots are NaN, unused table entries `unused`."""
    batch, heads, keys, _ = inputs["key"].shape
    starts = inputs.get("kv_starts", torch.zeros(batch, dtype=torch.int64)).tolist()
    firsts = [min(start, length) // page_size for start, length in zip(starts, lens, strict=True)]
    used = [-(-length // page_size) - first for length, first in zip(lens, firsts, strict=True)]
    order = torch.randperm(sum(used) + spare)[: sum(used)]
    table = torch.full((batch, -(-keys // page_size)), unused)
    for row, first, ids in zip(table, firsts, order.split(used), strict=True):
        row[first : first + len(ids)] = ids
    pages = {}
    for name in ("key", "value"):
        x = inputs[name]
        pool = x.new_full((sum(used) + spare, page_size, heads, x.shape[3]), NAN)
        for sequence, row, start, length in zip(x, table, starts, lens, strict=True):
            for j in range(start, length):
                pool[row[j // page_size], j % page_size] = sequence[:, j]
        pages[f"{name}_pages"] = pool
    device = inputs["query"].device
    return pages | {"block_table": table.to(device), "kv_lens": torch.tensor(lens, dtype=torch.int64, device=device)}


def call(**inputs):
    return attention_paged(**inputs, return_lse=True)


@dataclass(frozen=True)
class Pages:
    """A case whose kv_lens are given, and the size of its pages."""

    page_size: int
    case: Case

    @property
    def id(self):
        return f"{self.case.id}-page-{self.page_size}"

    def arguments(self, inputs, **options):
        """The arguments of attention_paged, from those of attention."""
        rest = {name: x for name, x in inputs.items() if name not in ("key", "value")}
        pages = paged(inputs, self.case.kv_lens, self.page_size, **options)
        return rest | pages | {"split_size": self.case.split_size}

    def call(self, **inputs):
        return call(**self.arguments(inputs))


def pages(name, page_size, lens, **options):
    keys = -(-max(lens) // page_size) * page_size
    sizes = {"batch": len(lens), "heads": (4, 2), "keys": keys, "dim": 32}
    return Pages(page_size, Case(name, kv_lens=lens, **sizes | options))


PAGES = [
    pages("one-row", 4, (13,), rows=1, dim=64),
    pages("one-row", 1, (13, 1, 0), rows=1),
    pages("one-row", 3, (50, 7, 3), rows=1),
    pages("one-row", 16, (70, 16, 17), rows=1, split_size=32),
    pages("one-row", 256, (1024, 700), rows=1, heads=(4, 4), dim=64),
    pages("one-row-splits", 64, (2300, 1100, 0), rows=1, dim=16, split_size=1024),
    pages("causal-splits", 100, (1500, 1025), rows=4, dim=16, causal=True, sinks=True, split_size=1024),
    pages("causal", 16, (70, 3, 40), rows=4, causal=True, split_size=32),
    pages("window", 5, (90, 41), rows=3, window=(20, 0), split_size=16),
    pages(
        "all-options",
        7,
        (90, 33, 0),
        rows=3,
        value_dim=24,
        window=(60, 0),
        softcap=2.0,
        scale=0.3,
        alibi=True,
        sinks=True,
        mask="bool",
        q_offset=40,
        split_size=32,
    ),
    pages("mask-float", 16, (60, 33), rows=2, mask="float-hides"),
    pages("starts", 7, (90, 41, 30), rows=3, kv_starts=(20, 41, 1), causal=True, split_size=16),
    pages("bias-mask", 16, (60, 33), rows=2, mask="bool-keys", bias="float-heads"),
    pages("query-lengths", 7, (90, 41, 30), rows=3, q_lens=(3, 1, 0), causal=True, split_size=16),
    pages("starts-splits", 64, (2300, 1100), rows=1, dim=16, kv_starts=(1030, 5), split_size=1024),
    pages("tiled", 16, (70, 3, 40), rows=20, causal=True),
    pages("tiled", 3, (70, 71), rows=40, window=(30, 5)),
    pages("tiled", 64, (150, 130), rows=70, causal=True, heads=(2, 2), dim=72),
    pages(
        "tiled-all-options",
        7,
        (90, 33, 0),
        rows=30,
        value_dim=24,
        window=(60, 0),
        softcap=2.0,
        scale=0.3,
        alibi=True,
        sinks=True,
        mask="float",
        q_offset=40,
    ),
    pages("tiled-mask", 16, (60, 33), rows=20, mask="bool"),
    pages("tiled-query-lengths", 7, (90, 41, 30), rows=40, q_lens=(1, 17, 40), causal=True),
    pages("tiled-starts", 7, (150, 80), rows=40, mask="bool", kv_starts=(71, 6), window=(50, None)),
]
EACH = pytest.mark.parametrize("pages", PAGES, ids=lambda pages: pages.id)


@EACH
def test_forward(pages, dtype, device):
    check_forward(pages.call, partial(pages.case.inputs, dtype, device))


@EACH
def test_unused_entries_of_the_table_may_be_anything(pages):
    results = []
    for unused in (-1, 0, 10**6, -(2**31)):
        torch.manual_seed(1)
        results.append(call(**pages.arguments(pages.case.inputs(torch.float32), unused=unused)))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("rows", [1, 3, 40], ids=["one-row", "decode", "tiled"])
def test_pages_that_the_window_has_passed_may_be_anything(rows, dtype, device):
    """A sliding window frees its pages: their entries hold -1, or the page of another sequence."""
    window, page_size, lens = 70, 16, (700, 90, 60)
    case = pages("", page_size, lens, rows=rows, causal=True, window=(window, 0))
    inputs = case.arguments(case.case.inputs(dtype, device))
    expected = call(**inputs)
    for row, length in zip(inputs["block_table"], lens, strict=True):
        passed = max(0, length - rows - window) // page_size
        row[:passed] = torch.tensor([-1, 10**6])[torch.arange(passed) % 2]
    assert_same_bits(call(**inputs), expected)


@pytest.mark.parametrize("rows", [1, 40], ids=["decode", "tiled"])
def test_queries_far_beyond_the_keys_see_none(rows, dtype, device):
    """The window has passed all keys, but not the tile that the last of them are in."""
    case = pages("", 16, (300, 20), rows=rows, window=(5, 0), q_offset=310)
    out, lse = call(**case.arguments(case.case.inputs(dtype, device)))
    assert not out.any() and (lse == -torch.inf).all()


@EACH
def test_where_the_pages_lie_changes_no_bit(pages, dtype):
    """Page numbers, strides of the pool, type and strides of the table."""
    arguments = pages.arguments(pages.case.inputs(dtype))
    expected, table = call(**arguments), arguments["block_table"]
    order = torch.randperm(len(arguments["key_pages"]))
    inverse = torch.cat([order.argsort(), torch.tensor([-1])])
    shuffled = {name: arguments[name][order] for name in ("key_pages", "value_pages")}
    assert_same_bits(call(**arguments | shuffled | {"block_table": inverse[table]}), expected)
    for permutation in ((0, 2, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2), (2, 3, 1, 0)):
        inverse = torch.tensor(permutation).argsort().tolist()
        stored = {name: arguments[name].permute(permutation).contiguous().permute(inverse) for name in shuffled}
        assert_same_bits(call(**arguments | stored), expected)
    strided = torch.stack([table, torch.full_like(table, -7)], -1).transpose(0, 1).contiguous().transpose(0, 1)[..., 0]
    for block_table in (table.int(), strided, strided.int()):
        assert_same_bits(call(**arguments | {"block_table": block_table}), expected)
    assert_same_bits(call(**arguments | {"kv_lens": arguments["kv_lens"].int()}), expected)


def test_sequences_may_share_pages(dtype):
    inputs = Case("", batch=2, heads=(4, 2), rows=3, keys=40, dim=16).inputs(dtype)
    inputs["key"][1, :, :16], inputs["value"][1, :, :16] = (
        inputs["key"][0, :, :16],
        inputs["value"][0, :, :16],
    )
    arguments = paged(inputs, (40, 33), 16)
    expected = call(query=inputs["query"], **arguments)
    arguments["block_table"][1, 0] = arguments["block_table"][0, 0]
    assert_same_bits(call(query=inputs["query"], **arguments), expected)


@pytest.mark.parametrize("split_size", [512, 2048])
def test_every_row_is_written(split_size, dtype):
    """Two sequences, four pages of 256 each: in two splits and in one."""
    large = pages("", 256, (1024, 1000), rows=1, heads=(4, 4), dim=64, split_size=split_size)
    check_forward(large.call, partial(large.case.inputs, dtype))


@pytest.mark.parametrize("rows", [3, 40], ids=["decode", "tiled"])
def test_a_longer_table_changes_no_bit(rows, dtype):
    short = pages("", 16, (70, 33), rows=rows)
    arguments = short.arguments(short.case.inputs(dtype))
    table = arguments["block_table"]
    longer = torch.cat([table, torch.full((2, 100), 10**6)], 1)
    assert_same_bits(call(**arguments | {"block_table": longer}), call(**arguments))


@pytest.mark.parametrize("rows", [3, 40], ids=["decode", "tiled"])
def test_one_page_each_is_attention(rows, dtype):
    inputs = Case("", batch=2, heads=(4, 2), rows=rows, keys=70, dim=16, kv_lens=(70, 33)).inputs(dtype)
    out = attention(**inputs, return_lse=True)
    key_pages, value_pages = (inputs[name].transpose(1, 2) for name in ("key", "value"))
    rest = {name: x for name, x in inputs.items() if name not in ("key", "value")}
    table = torch.arange(2)[:, None]
    assert_same_bits(call(**rest, key_pages=key_pages, value_pages=value_pages, block_table=table), out)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"rows": 0}, {"keys": 0}, {"heads": (0, 0)}, {"dim": 0}], ids=str)
def test_empty(sizes, dtype):
    case = Case("", **{"batch": 2, "heads": (4, 2), "rows": 3, "keys": 20, "dim": 16, "value_dim": 8} | sizes)
    inputs = case.inputs(dtype)
    arguments = paged(inputs, (case.keys,) * case.batch, 4, spare=0)
    out, lse = call(query=inputs["query"], **arguments)
    assert out.shape == (case.batch, case.heads[0], case.rows, 8) and lse.shape == out.shape[:3]
    assert case.keys or not out.any()


def test_no_pages_and_no_columns():
    arguments = {
        "query": torch.randn(2, 4, 3, 16),
        "key_pages": torch.empty(0, 4, 2, 16),
        "value_pages": torch.empty(0, 4, 2, 8),
    }
    lens = torch.zeros(2, dtype=torch.int32)
    for table in (torch.empty(2, 0, dtype=torch.int32), torch.full((2, 3), 9)):
        out, lse = call(**arguments, block_table=table, kv_lens=lens)
        assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("wrt", ["query", "key_pages", "value_pages"])
def test_pages_are_not_differentiated_and_say_so(wrt):
    """The forward works where a gradient is asked for; the backward explains itself."""
    arguments = PAGES[5].arguments(PAGES[5].case.inputs(torch.float32))
    out, _ = call(**arguments)
    arguments[wrt].requires_grad_()
    found, _ = call(**arguments)
    assert_same_bits(found.detach(), out)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)paged"):
        found.sum().backward()


def test_inputs_are_not_written(dtype):
    arguments = PAGES[7].arguments(PAGES[7].case.inputs(dtype))
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    call(**arguments)
    assert all(is_real(x) or x.dtype in (torch.int64, torch.bool) for x in before.values())
    assert_same_bits({name: arguments[name] for name in before}, before)


@dataclass(frozen=True)
class Step:
    """A call of attention_varlen over pages: sequences of any number of queries, as a server has them in one step."""

    id: str
    lens_q: tuple[int, ...]
    case: Case  # its kv_lens are those of the sequences; its rows are not used
    page_size: int = 16

    def inputs(self, dtype, device="cpu"):
        inputs = self.case.inputs(dtype, device)
        query = torch.randn(sum(self.lens_q), self.case.heads[0], self.case.dim)
        return inputs | {"query": query.to(device, dtype)}

    def arguments(self, inputs):
        pages = paged(inputs, self.case.kv_lens, self.page_size)
        pages["key"], pages["value"] = pages.pop("key_pages"), pages.pop("value_pages")
        lengths = {"cu_seqlens_q": offsets(self.lens_q).to(inputs["query"].device), "max_seqlen_q": max(self.lens_q)}
        return inputs | pages | lengths | {"split_size": self.case.split_size}

    def call(self, **inputs):
        return attention_varlen(**self.arguments(inputs), return_lse=True)

    def dense(self, query, reordered=False, **inputs):
        results = []
        for b, rows in enumerate(query.split(self.lens_q)):
            per_head = [name for name in ("alibi_slopes", "sinks") if name in inputs and inputs[name].dim() == 1]
            each = [name for name, x in inputs.items() if isinstance(x, torch.Tensor) and name not in per_head]
            one = inputs | {name: inputs[name][b : b + 1] for name in each}
            results.append(reference.attention(rows.transpose(0, 1)[None], **one, reordered=reordered))
        outs, lses = zip(*results, strict=True)
        return torch.cat([x[0].transpose(0, 1) for x in outs]), torch.cat([x[0] for x in lses], 1)


def step(name, lens_q, lens, *, page_size=16, **options):
    sizes = {"batch": len(lens), "heads": (4, 2), "rows": 1, "dim": 32, "value_dim": 24}
    keys = -(-max(lens) // page_size) * page_size
    return Step(name, lens_q, Case(name, keys=keys, kv_lens=lens, **sizes | options), page_size)


STEPS = [
    step("decode", (1, 1, 1), (40, 3, 17), causal=True),
    step("speculative", (4, 4, 4), (40, 4, 17), causal=True, alibi=True, split_size=16),
    step("prefill", (20, 0, 33), (20, 0, 33), causal=True, page_size=7),
    step("chunked-prefill", (20, 18), (90, 150), causal=True, page_size=5),
    step("mixed", (1, 40, 0, 16, 17, 3), (70, 100, 5, 16, 60, 3), causal=True, split_size=32),
    step("mixed-splits", (30, 1), (30, 2500), causal=True, dim=8, value_dim=8, heads=(2, 1)),
    step(
        "mixed-all",
        (2, 30, 5),
        (90, 61, 80),
        window=(40, 0),
        softcap=3.0,
        alibi="per-sequence",
        sinks=True,
        kv_starts=(33, 7, 80),
        page_size=7,
    ),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.id)
class TestVarlen:
    def test_forward(self, step, dtype, device):
        check_forward(step.call, partial(step.inputs, dtype, device), step.dense)

    def test_a_short_sequence_has_the_bits_of_its_own_decode_call(self, step, dtype, device):
        inputs = step.inputs(dtype, device)
        arguments = step.arguments(inputs)
        found = attention_varlen(**arguments, return_lse=True)
        rest = {name: x for name, x in arguments.items() if name not in ("query", "cu_seqlens_q", "max_seqlen_q")}
        rest["key_pages"], rest["value_pages"] = rest.pop("key"), rest.pop("value")
        begin = 0
        for b, (rows, count) in enumerate(zip(arguments["query"].split(step.lens_q), step.lens_q, strict=True)):
            end = begin + count
            if 0 < count <= 16:
                each = ("block_table", "kv_lens", "kv_starts", "alibi_slopes")
                each = [name for name in each if name in rest and (name != "alibi_slopes" or rest[name].dim() == 2)]
                one = rest | {name: rest[name][b : b + 1] for name in each}
                out, lse = call(query=rows.transpose(0, 1)[None], **one)
                assert_same_bits((found[0][begin:end], found[1][:, begin:end]), (out[0].transpose(0, 1), lse[0]))
            begin = end


def test_a_step_reads_only_what_its_queries_see(dtype, device):
    """Pages before the window and beyond kv_lens may be anything; other sequences' NaN stays theirs."""
    mixed = step("", (1, 40), (150, 100), causal=True, window=(50, 0))
    inputs = mixed.inputs(dtype, device)
    arguments = mixed.arguments(inputs)
    expected = attention_varlen(**arguments)
    arguments["block_table"][0, :6] = 10**6
    assert_same_bits(attention_varlen(**arguments), expected)


def test_a_step_is_not_differentiated_and_says_so():
    arguments = STEPS[4].arguments(STEPS[4].inputs(torch.float32))
    arguments["query"].requires_grad_()
    with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)paged"):
        attention_varlen(**arguments).sum().backward()
