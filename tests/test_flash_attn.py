"""FlashAttention's functions, in its layout and with its parameters, against dense attention in float64."""

import importlib.metadata
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import pytest
import torch

import reference
import test_paged
import test_varlen
from cases import NAN, Case
from checks import assert_same_bits, check_backward, check_forward, gradients, random_gradients
from flashsoftmax.integrations import bert_padding, flash_attn
from flashsoftmax.options import NAMES
from test_append import rotated, tables

NO_DROPOUT = "dropout_p" not in NAMES
PARAMETERS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
VARLEN = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SIGNATURES = {
    "flash_attn_func": (("q", "k", "v"), PARAMETERS | {"s_aux": None}),
    "flash_attn_qkvpacked_func": (("qkv",), PARAMETERS),
    "flash_attn_kvpacked_func": (("q", "kv"), PARAMETERS),
    "flash_attn_varlen_func": (("q", "k", "v", *VARLEN), PARAMETERS | {"block_table": None, "s_aux": None}),
    "flash_attn_varlen_qkvpacked_func": (("qkv", "cu_seqlens", "max_seqlen"), PARAMETERS),
    "flash_attn_varlen_kvpacked_func": (("q", "kv", *VARLEN), PARAMETERS),
    "flash_attn_with_kvcache": (
        ("q", "k_cache", "v_cache"),
        dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad"))
        | {"block_table": None, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0}
        | {"rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False}
        | {"s_aux": None},
    ),
}


def on_interpreter(dtype=None, case=None, cache=None, **_):
    """A few cases of each kind: the kernels themselves are tested elsewhere."""
    return dtype == torch.float16 and getattr(case or cache, "id", None) in (
        "causal",
        "decode",
        "paged-rotary",
        "index",
    )


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_are_those_of_flash_attn(name):
    """Names, order and defaults: transformers passes what inspect.signature shows."""
    required, optional = SIGNATURES[name]
    found = inspect.signature(getattr(flash_attn, name)).parameters
    assert [*found] == [*required, *optional]
    assert {x: found[x].default for x in optional} == optional


def translated(causal=False, window=None, scale=None, softcap=None, alibi_slopes=None, sinks=None, q_offset=None):
    """Options of flashsoftmax.attention as those of flash_attn."""
    assert q_offset is None
    window_size = (-1, -1) if window is None else tuple(-1 if bound is None else bound for bound in window)
    found = {"causal": causal, "window_size": window_size, "softmax_scale": scale, "softcap": softcap or 0.0}
    found |= {"alibi_slopes": None if alibi_slopes is None else alibi_slopes.to(torch.float32)}
    return found | ({} if sinks is None else {"s_aux": sinks})


def call(query, key, value, **options):
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **translated(**options))
    return out.transpose(1, 2), lse


CASES = [
    Case("plain", value_dim=24),
    Case("causal", batch=2, heads=(4, 2), rows=20, keys=40, dim=32, causal=True),
    Case("more-queries", rows=70, keys=40, dim=59, causal=True),
    Case("window", rows=60, keys=60, window=(20, 7)),
    Case("window-left", rows=60, keys=80, window=(20, None)),
    Case("window-causal", rows=60, keys=80, window=(0, 0), causal=True),
    Case("softcap", rows=33, softcap=5.0, scale=0.3, dim=40),
    Case("alibi", heads=(4, 2), alibi=True, causal=True),
    Case("alibi-per-sequence", batch=3, heads=(4, 4), rows=30, keys=50, alibi="per-sequence"),
    Case("sinks", heads=(4, 2), rows=30, sinks=True, causal=True, window=(9, 0)),
    Case("decode", batch=2, heads=(6, 2), rows=1, keys=300, causal=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
class TestDense:
    def test_forward(self, case, dtype, device):
        check_forward(call, partial(case.inputs, dtype, device))

    def test_backward(self, case, dtype):
        check_backward(call, partial(case.inputs, dtype), of=("out",))


class TestPacked:
    def test_of_equal_sequences(self, dtype):
        """The same bits as from separate tensors, gradients included."""
        inputs = Case("", batch=2, heads=(4, 4), rows=40, keys=40, dim=32, causal=True).inputs(dtype)
        expected = call(**inputs)
        upstream = random_gradients(call, inputs)
        grads = gradients(call, inputs, upstream, ["query", "key", "value"])

        def three(query, key, value, causal, **_):
            qkv = torch.stack([x.transpose(1, 2) for x in (query, key, value)], 2)
            out, lse, _ = flash_attn.flash_attn_qkvpacked_func(qkv, causal=causal, return_attn_probs=True)
            return out.transpose(1, 2), lse

        def two(query, key, value, causal, **_):
            kv = torch.stack([x.transpose(1, 2) for x in (key, value)], 2)
            arguments = query.transpose(1, 2), kv, 0.0, None, causal
            out, lse, _ = flash_attn.flash_attn_kvpacked_func(*arguments, return_attn_probs=True)
            return out.transpose(1, 2), lse

        for packed in (three, two):
            assert_same_bits(packed(**inputs), expected)
            assert_same_bits(gradients(packed, inputs, upstream, ["query", "key", "value"]), grads)

    def test_of_sequences_of_any_length(self, dtype):
        q, k, v = torch.randn(3, 30, 4, 16, dtype=dtype).unbind()
        cu = test_varlen.offsets((5, 0, 25))
        expected = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 25, 25, causal=True, softmax_scale=0.3)
        options = 0.0, 0.3, True
        out = flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), cu, 25, *options)
        assert_same_bits(out, expected)
        out = flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), cu, cu, 25, 25, *options)
        assert_same_bits(out, expected)


def call_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        query, key, value, *lengths, return_attn_probs=True, **translated(**options)
    )
    return out, lse


SEQUENCES = [
    test_varlen.Sequences("several", (5, 70, 1, 130), (9, 70, 33, 131)),
    test_varlen.Sequences("causal", (5, 40, 0, 1), (9, 20, 3, 33), options=(("causal", True),)),
    test_varlen.Sequences("alibi", (20, 30), (20, 50), alibi="per-sequence", options=(("window", (20, 3)),)),
    test_varlen.Sequences("sinks", (20, 30), (20, 50), sinks=True, options=(("causal", True), ("softcap", 4.0))),
]
STEPS = [
    test_paged.step("decode", (1, 1, 1), (40, 3, 17), causal=True),
    test_paged.step("mixed", (1, 40, 0, 16, 17, 3), (70, 100, 5, 16, 60, 3), causal=True, window=(50, 0)),
]


class TestVarlen:
    @pytest.mark.parametrize("case", SEQUENCES, ids=lambda case: case.id)
    def test_forward(self, case, dtype, device):
        check_forward(call_varlen, partial(case.inputs, dtype, device), test_varlen.dense)

    @pytest.mark.parametrize("case", SEQUENCES, ids=lambda case: case.id)
    def test_backward(self, case, dtype):
        check_backward(call_varlen, partial(case.inputs, dtype), test_varlen.dense, of=("out",))

    @pytest.mark.parametrize("case", STEPS, ids=lambda case: case.id)
    def test_pages(self, case, dtype, device):
        def paged(**inputs):
            arguments = case.arguments(inputs)
            names = ("query", "key", "value", "cu_seqlens_q", "max_seqlen_q", "block_table")
            query, key, value, cu_q, most, table = (arguments.pop(name) for name in names)
            cu_k = test_varlen.offsets(arguments.pop("kv_lens").tolist()).to(query.device)
            arguments.pop("split_size")
            options = translated(**arguments) | {"block_table": table, "return_attn_probs": True}
            return flash_attn.flash_attn_varlen_func(query, key, value, cu_q, cu_k, most, 100, **options)[:2]

        check_forward(paged, partial(case.inputs, dtype, device), case.dense)


@dataclass(frozen=True)
class Cache:
    """A call of flash_attn_with_kvcache. All of the cache that the call must not read is NaN."""

    id: str
    lens: tuple[int, ...] = (40, 3, 0)
    new: int = 1  # keys to append; 0: none
    rows: int = 1
    capacity: int = 96
    page_size: int | None = None
    indexed: bool = False  # by cache_batch_idx
    leftpad: tuple[int, ...] | None = None
    rotary: str | None = None
    alibi: str | bool = False
    sinks: bool = False
    num_splits: int = 0
    options: tuple[tuple[str, object], ...] = ()

    def inputs(self, dtype, device="cpu"):
        heads, dims = (4, 2), (32, 24)
        case = Case(
            "", len(self.lens), heads, self.rows, self.capacity, *dims, kv_lens=self.lens, kv_starts=self.leftpad,
            alibi=self.alibi, sinks=self.sinks, **dict(self.options),
        )  # fmt: skip
        inputs = case.inputs(dtype, device)
        for name, dim in zip(("new_key", "new_value"), dims, strict=True):
            inputs[name] = torch.randn(len(self.lens), heads[1], self.new, dim).to(device, dtype)
        return inputs | tables(self.rotary, self.capacity, 8, dtype, device)

    def dense(self, dtype, query, key, value, new_key, new_value, kv_lens, **rest):
        cos, sin, interleaved = (rest.pop(f"rotary_{name}") for name in ("cos", "sin", "interleaved"))

        def rotate(x, positions):
            """Naively, so in the dtype of the cache, unless this is the reference."""
            if cos is None or x.dtype == torch.float64:
                return rotated(x, cos, sin, positions, interleaved)
            return rotated(x.to(dtype), cos, sin, positions, interleaved).to(x.dtype)

        positions = kv_lens[:, None] + torch.arange(self.new, device=query.device)
        new_key = rotate(new_key, positions)
        is_banded = rest["causal"] or rest["window"] is not None
        steps = torch.arange(self.rows, device=query.device) * is_banded
        query = rotate(query, kv_lens[:, None] + steps)
        key, value = key.clone(), value.clone()
        batch = torch.arange(len(self.lens))[:, None]
        key.transpose(1, 2)[batch, positions] = new_key.transpose(1, 2)
        value.transpose(1, 2)[batch, positions] = new_value.transpose(1, 2)
        return reference.attention(query, key, value, kv_lens=kv_lens + self.new, **rest)

    def arguments(self, inputs):
        """The arguments of flash_attn_with_kvcache, with a cache of their own."""
        query, key, value, new_key, new_value = (
            inputs[name].transpose(1, 2) for name in ("query", "key", "value", "new_key", "new_value")
        )
        rest = {name: inputs.get(name) for name in ("causal", "window", "scale", "softcap", "alibi_slopes", "sinks")}
        found = translated(**rest) | {name: inputs[name] for name in inputs if name.startswith("rotary_")}
        found |= {"q": query, "cache_seqlens": inputs["kv_lens"].int(), "num_splits": self.num_splits}
        if self.new:
            found |= {"k": new_key, "v": new_value}
        if self.leftpad:
            found["cache_leftpad"] = inputs["kv_starts"].int()
        batch, device = len(self.lens), query.device
        if self.page_size:
            pages = self.capacity // self.page_size
            table = torch.randperm(batch * pages).view(batch, pages).to(device)
            for name, x in (("k_cache", key), ("v_cache", value)):
                pool = x.new_empty(batch * pages, self.page_size, *x.shape[2:])
                pool[table] = x.unflatten(1, (pages, self.page_size))
                found[name] = pool
            ends = inputs["kv_lens"] + self.new
            unused = torch.arange(pages, device=device) * self.page_size >= ends[:, None]
            found["block_table"] = table.masked_fill(unused, 10**6).int()
        elif self.indexed:
            index = torch.randperm(2 * batch)[:batch].to(device)
            for name, x in (("k_cache", key), ("v_cache", value)):
                found[name] = x.new_full((2 * batch, *x.shape[1:]), NAN)
                found[name][index] = x
            found["cache_batch_idx"] = index.int()
        else:
            found |= {"k_cache": key.clone(), "v_cache": value.clone()}
        return found

    def call(self, **inputs):
        out, lse = flash_attn.flash_attn_with_kvcache(**self.arguments(inputs), return_softmax_lse=True)
        return out.transpose(1, 2), lse


CAUSAL = (("causal", True),)
PAGED = {"page_size": 16}
CACHES = [
    Cache("decode", options=CAUSAL),
    Cache("nothing-new", new=0, lens=(40, 3, 96)),
    Cache("prefill", lens=(0, 0), new=30, rows=30, options=CAUSAL),
    Cache("chunk", lens=(50, 7), new=30, rows=30, options=(("causal", True), ("window", (20, 0)))),
    Cache("more-queries-than-new", lens=(50, 20), new=3, rows=5, options=CAUSAL),
    Cache("rotary", new=3, rows=3, rotary="interleaved", options=CAUSAL),
    Cache("rotary-window", new=3, rows=3, rotary="halves", options=(("window", (9, None)),)),
    Cache("rotary-full", new=2, rows=20, rotary="halves"),
    Cache("index", new=2, rows=2, indexed=True, options=CAUSAL),
    Cache("index-rotary", new=20, rows=20, indexed=True, rotary="interleaved", options=CAUSAL),
    Cache("leftpad", lens=(40, 7), leftpad=(9, 7), new=2, rows=2, rotary="halves", options=CAUSAL),
    Cache("paged", **PAGED, lens=(40, 15, 16), new=2, rows=2, options=CAUSAL),
    Cache("paged-rotary", **PAGED, lens=(40, 15, 0), new=20, rows=20, rotary="halves", options=CAUSAL),
    Cache("paged-leftpad", page_size=3, lens=(40, 7), leftpad=(9, 7), options=CAUSAL),
    Cache("score", **PAGED, alibi="per-sequence", sinks=True, options=(("softcap", 3.0), ("scale", 0.4))),
    Cache("one-split", num_splits=1, capacity=1200, lens=(1100, 5)),
    Cache("splits", num_splits=3, capacity=1200, lens=(1100, 5)),
]
EACH = pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.id)


class TestKVCache:
    @EACH
    def test_forward(self, cache, dtype, device):
        check_forward(cache.call, partial(cache.inputs, dtype, device), partial(cache.dense, dtype))

    @pytest.mark.parametrize("cache", [x for x in CACHES if x.new], ids=lambda cache: cache.id)
    def test_new_keys_are_in_the_cache_afterwards(self, cache, dtype):
        """A second call, which appends nothing, has the bits of the first; what it held before is unchanged."""
        arguments = cache.arguments(cache.inputs(dtype) | tables(None, 0, 0))
        before = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
        first = flash_attn.flash_attn_with_kvcache(**arguments)
        arguments["cache_seqlens"] = arguments["cache_seqlens"] + cache.new
        del arguments["k"], arguments["v"]
        assert_same_bits(flash_attn.flash_attn_with_kvcache(**arguments), first)
        for name, x in before.items():
            changed = ~torch.isclose(arguments[name], x, rtol=0, atol=0, equal_nan=True)
            rows = changed.flatten(2).any(2)
            assert rows.sum() == cache.new * len(cache.lens)

    def test_lengths_may_be_an_int_or_all(self, dtype):
        q, cache = torch.randn(2, 1, 4, 16, dtype=dtype), torch.randn(2, 50, 2, 16, dtype=dtype)
        arguments = q, cache, cache
        expected = flash_attn.flash_attn_with_kvcache(*arguments, cache_seqlens=torch.tensor([50, 50]))
        assert_same_bits(flash_attn.flash_attn_with_kvcache(*arguments), expected)
        assert_same_bits(flash_attn.flash_attn_with_kvcache(*arguments, cache_seqlens=50), expected)

    def test_there_is_no_gradient(self):
        q = torch.randn(2, 1, 4, 16, requires_grad=True)
        new = torch.randn(2, 1, 2, 16, requires_grad=True)
        cache = torch.zeros(2, 50, 2, 16)
        out = flash_attn.flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=3)
        assert not out.requires_grad and cache[:, 3].equal(new[:, 0])

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"cache_seqlens": torch.tensor([40, 15, 95])}, r"kv_lens\[2\]: 97, wanted 0 to 96"),
            ({"cache_seqlens": torch.tensor([40, -1, 5])}, r"kv_lens\[1\]: -1"),
            ({"cache_seqlens": None}, "cache_seqlens: None, wanted with k and v"),
            ({"page": (0, 0, 10**6)}, r"block_table\[0, 0\]: page 1000000"),  # only read
            ({"page": (1, 1, -1)}, r"block_table\[1, 1\]: page -1"),  # written
            ({"cache_leftpad": torch.tensor([0, -1, 0])}, r"kv_starts\[1\]: -1"),
            ({"softmax_scale": float("nan")}, "scale: nan"),
            ({"v": None}, "v: None, wanted k and v together"),
            ({"k": None, "v": None, "rotary_cos": torch.ones(9, 2)}, "rotary_cos, rotary_sin: given without k and v"),
            ({"rotary_cos": torch.ones(96, 2)}, "rotary_cos, rotary_sin: one of them is missing"),
            ({"rotary_cos": torch.ones(16, 2), "rotary_sin": torch.ones(16, 2)}, r"positions\[0\]: 40, wanted 0 to 14"),
            ({"cache_batch_idx": torch.tensor([0, 1, 2])}, "cache_batch_idx: given together with block_table"),
            ({"window_size": (1, 2, 3)}, "window_size: 3 elements"),
            ({"q": torch.zeros(3, 4, 32)}, "q: 3 dimensions, wanted 4"),
        ],
        ids=str,
    )
    def test_an_error_comes_before_anything_is_written(self, changes, message):
        cache = next(x for x in CACHES if x.id == "paged")
        arguments = cache.arguments(cache.inputs(torch.float32))
        before = arguments["k_cache"].clone(), arguments["v_cache"].clone()
        if "page" in changes:
            row, column, page = changes["page"]
            arguments["block_table"][row, column] = page
            changes = {}
        with pytest.raises(ValueError, match=message):
            flash_attn.flash_attn_with_kvcache(**arguments | changes)
        assert_same_bits((arguments["k_cache"], arguments["v_cache"]), before)


class TestOptions:
    def test_windows_may_be_tensors(self):
        q = torch.randn(2, 30, 4, 16)
        expected = flash_attn.flash_attn_func(q, q, q, window_size=(5, 3))
        assert_same_bits(flash_attn.flash_attn_func(q, q, q, window_size=torch.tensor([5, 3])), expected)

    def test_softcap_of_0_and_less_is_none(self):
        q = torch.randn(2, 30, 4, 16)
        assert_same_bits(flash_attn.flash_attn_func(q, q, q, softcap=-1.0), flash_attn.flash_attn_func(q, q, q))

    def test_return_attn_probs(self):
        """(out, lse, nothing); the weights, which flash_attn has with dropout only, are refused."""
        q = torch.randn(2, 5, 4, 16)
        out, lse, weights = flash_attn.flash_attn_func(q, q, q, return_attn_probs=True)
        assert out.shape == q.shape and lse.shape == (2, 4, 5) and weights.numel() == 0
        with pytest.raises((NotImplementedError, TypeError), match="S_dmask" if not NO_DROPOUT else "dropout_p"):
            flash_attn.flash_attn_func(q, q, q, 0.5, return_attn_probs=True)

    @pytest.mark.skipif(NO_DROPOUT, reason="attention has no dropout_p")
    def test_dropout(self):
        """Weights become 0 with that probability, others are scaled up: with values of 1, the output's mean is 1."""
        q, ones = torch.randn(2, 200, 4, 16), torch.ones(2, 200, 4, 16)
        out = flash_attn.flash_attn_func(q, q, ones, dropout_p=0.3)
        assert out.std() > 0 and abs(out.mean() - 1) < 0.02
        x, cu = ones.flatten(0, 1), torch.tensor([0, 200, 400], dtype=torch.int32)
        assert flash_attn.flash_attn_varlen_func(q.flatten(0, 1), x, x, cu, cu, 200, 200, dropout_p=0.3).std() > 0

    def test_layouts_are_explained(self):
        x = torch.randn(5, 4, 16)
        with pytest.raises(ValueError, match=r"q: 3 dimensions, wanted 4: \[batch, tokens, heads, head_dim\]"):
            flash_attn.flash_attn_func(x, x, x)
        with pytest.raises(ValueError, match=r"qkv: shape \[5, 4, 16\], wanted \[B, S, 3, H, D\]"):
            flash_attn.flash_attn_qkvpacked_func(x)
        with pytest.raises(ValueError, match=r"kv: shape \[5, 3, 4, 16\], wanted \[T, 2, H, D\]"):
            cu = torch.tensor([0, 5], dtype=torch.int32)
            flash_attn.flash_attn_varlen_kvpacked_func(x, torch.randn(5, 3, 4, 16), cu, cu, 5, 5)

    def test_compiles(self):
        @partial(torch.compile, fullgraph=True, backend="aot_eager")
        def step(q, cache, new, lens, cos, sin):
            x = flash_attn.flash_attn_func(q, q, q, causal=True, window_size=(3, -1))
            options = {"cache_seqlens": lens, "causal": True, "rotary_cos": cos, "rotary_sin": sin}
            return flash_attn.flash_attn_with_kvcache(x, cache[0], cache[1], new, new, **options)

        q, cache, new = torch.randn(2, 3, 4, 16), torch.randn(2, 2, 20, 2, 16), torch.randn(2, 3, 2, 16)
        cos, sin = torch.rand(2, 20, 8).unbind()
        arguments = q, cache.clone(), new, torch.tensor([5, 9]), cos, sin
        out = step(*arguments)
        expected = step.__wrapped__(q, cache, *arguments[2:])
        assert_same_bits((out, arguments[1]), (expected, cache))


class TestInstall:
    @pytest.fixture(autouse=True)
    def installed(self):
        flash_attn.install()
        yield
        flash_attn.uninstall()

    def test_imports_find_it(self):
        import flash_attn as package
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        from flash_attn.flash_attn_interface import flash_attn_varlen_func

        assert package.flash_attn_func is flash_attn.flash_attn_func
        assert flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
        assert (index_first_axis, pad_input, unpad_input) == (
            bert_padding.index_first_axis,
            bert_padding.pad_input,
            bert_padding.unpad_input,
        )
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("flash_attn.layers")

    def test_programs_that_look_for_it_find_a_version(self):
        assert importlib.util.find_spec("flash_attn") is not None
        assert importlib.util.find_spec("flash_attn.bert_padding") is not None
        assert sys.modules["flash_attn"].__version__.startswith("2.8")
        for name in ("flash_attn", "flash-attn"):
            assert importlib.metadata.version(name) == flash_attn.__version__
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
        assert importlib.metadata.version("torch") != flash_attn.__version__

    def test_uninstall_brings_back_what_was_there(self):
        flash_attn.uninstall()
        assert "flash_attn" not in sys.modules and "flash_attn.bert_padding" not in sys.modules
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("flash_attn")
        other, submodule = ModuleType("flash_attn"), ModuleType("flash_attn.layers")
        sys.modules.update({"flash_attn": other, "flash_attn.layers": submodule})
        try:
            flash_attn.install()
            flash_attn.install()
            assert sys.modules["flash_attn"] is not other and "flash_attn.layers" not in sys.modules
            flash_attn.uninstall()
            flash_attn.uninstall()
            assert sys.modules["flash_attn"] is other and sys.modules["flash_attn.layers"] is submodule
        finally:
            del sys.modules["flash_attn"], sys.modules["flash_attn.layers"]


class TestBertPadding:
    MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 1, 0]])

    def test_unpad_and_pad(self):
        x = torch.randn(4, 4, 3, requires_grad=True)
        rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, self.MASK)
        assert_same_bits(rows, x[self.MASK.bool()])
        assert indices.tolist() == [0, 1, 4, 5, 6, 7, 13, 14] and longest == 4
        assert cu_seqlens.tolist() == [0, 2, 6, 6, 8] and cu_seqlens.dtype == torch.int32
        assert used.tolist() == [2, 4, 0, 2]
        padded = bert_padding.pad_input(rows, indices, 4, 4)
        assert_same_bits(padded, x * self.MASK[..., None])
        (grad,) = torch.autograd.grad(padded.sum(), x)
        assert_same_bits(grad, self.MASK[..., None].expand(4, 4, 3).float())

    def test_unused_tokens_are_packed_but_not_counted(self):
        unused = torch.tensor([[0, 0, 1, 0], [0] * 4, [1, 0, 0, 0], [0] * 4])
        _, indices, cu_seqlens, longest, used = bert_padding.unpad_input(torch.randn(4, 4, 3), self.MASK, unused)
        assert indices.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 13, 14] and longest == 4
        assert cu_seqlens.tolist() == [0, 3, 7, 8, 10] and used.tolist() == [2, 4, 0, 2]

    def test_concatenated_sequences(self):
        lengths = torch.tensor([[2, 1, 0, 0], [4, 0, 0, 0], [1, 1, 1, 0]])
        x = torch.randn(3, 4, 5)
        rows, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
        assert indices.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10] and longest == 4
        assert cu.tolist() == [0, 2, 3, 7, 8, 9, 10]
        assert_same_bits(rows, x.flatten(0, 1)[indices])
