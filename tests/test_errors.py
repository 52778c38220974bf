"""Bad input is refused with the argument, what was found, what is wanted. Nothing crashes, whatever comes."""

import contextlib
import re

import numpy as np
import pytest
import torch
from torch import nan
from torch.utils import _pytree as pytree

import operators
from flashsoftmax import attention, attention_paged, attention_varlen, merge
from operators import integers

rand = torch.randn


def refused(call, valid, change, name, *words):
    """The message begins with the argument's name; what was found and what is wanted follow in any order."""
    call(**valid)
    with pytest.raises((ValueError, TypeError)) as error:
        call(**valid | change)
    message = str(error.value)
    assert re.match(rf"{name}\b", message), f"does not name {name}: {message}"
    for word in words:
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message), f"does not say {word}: {message}"
    if "meta" not in words:
        on_meta(call, valid | change, message)


VALUES = (
    r"(q_lens|kv_lens|kv_starts|cu_seqlens_[qk]|block_table)(\[|: ends)|max_seqlen_[qk]: \d+, wanted at least [1-9]"
)


def on_meta(call, arguments, message):
    """Tensors without values are refused with the same words, but for what only the values show."""
    numbers = {name: arguments.pop(name) for name in ("scale", "q_offset", "causal") if name in arguments}
    arguments = pytree.tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, arguments) | numbers
    if re.match(VALUES, message):
        call(**arguments)
        return
    with pytest.raises((ValueError, TypeError)) as error:
        call(**arguments)
    assert str(error.value) == message


def table(*rows):
    return pytest.mark.parametrize(("change", "words"), [pytest.param(c, w, id="-".join(w)) for c, *w in rows])


VALID = {"query": rand(2, 4, 5, 8), "key": rand(2, 2, 7, 8), "value": rand(2, 2, 7, 6)}
HALF = {name: x.half() for name, x in VALID.items()}


@table(
    # Type, rank, dtype.
    ({"query": [[1.0]]}, "query", "list"),
    ({"key": None}, "key", "NoneType"),
    ({"value": 3.0}, "value", "float"),
    ({"query": rand(4, 5, 8)}, "query", "3", "4"),
    ({"key": rand(1, 2, 2, 7, 8)}, "key", "5", "4"),
    ({"value": rand(7, 6)}, "value", "2", "4"),
    ({name: x.long() for name, x in VALID.items()}, "query", "int64"),
    ({name: x.to(torch.complex64) for name, x in VALID.items()}, "query", "complex64"),
    ({name: x.bool() for name, x in VALID.items()}, "query", "bool"),
    ({"key": VALID["key"].half()}, "key", "float16", "float32"),
    ({"value": VALID["value"].double()}, "value", "float64", "float32"),
    # Sizes.
    ({"key": rand(3, 2, 7, 8)}, "key", "3", "2"),
    ({"value": rand(1, 2, 7, 6)}, "value", "1", "2"),
    ({"key": rand(2, 2, 7, 9)}, "key", "9", "8"),
    ({"value": rand(2, 2, 8, 6)}, "value", "8", "7"),
    ({"value": rand(2, 4, 7, 6)}, "value", "4", "2"),
    ({"query": rand(2, 3, 5, 8)}, "query", "3", "2"),
    ({"query": rand(2, 33, 5, 8)}, "query", "33", "2"),
    ({"key": rand(2, 0, 7, 8), "value": rand(2, 0, 7, 6)}, "query", "4", "0"),
    ({"query": rand(2, 4, 5, 257), "key": rand(2, 2, 7, 257)}, "query", "257", "256"),
    ({"value": rand(2, 2, 7, 257)}, "value", "257", "256"),
    # attn_mask.
    ({"attn_mask": 1.0}, "attn_mask", "float"),
    ({"attn_mask": torch.ones(5, 7, dtype=torch.int64)}, "attn_mask", "int64"),
    ({"attn_mask": torch.ones(5, 7, dtype=torch.uint8)}, "attn_mask", "uint8"),
    ({"attn_mask": rand(1, 1, 1, 5, 7)}, "attn_mask", "5"),
    ({"attn_mask": rand(5, 6)}, "attn_mask", "6", "7"),
    ({"attn_mask": rand(4, 7)}, "attn_mask", "4", "5"),
    ({"attn_mask": rand(2, 2, 5, 7)}, "attn_mask", "2", "4"),
    ({"attn_mask": rand(3, 1, 5, 7)}, "attn_mask", "3", "2"),
    ({"attn_bias": 1.0}, "attn_bias", "float"),
    ({"attn_bias": rand(5, 7) > 0}, "attn_bias", "bool", "floating"),
    ({"attn_bias": rand(5, 6)}, "attn_bias", "6", "7"),
    ({"attn_bias": rand(5, 7), "attn_mask": rand(5, 7)}, "attn_bias", "attn_mask", "bool"),
    ({"attn_mask": (rand(5, 7) > 0).to("meta")}, "attn_mask", "meta", "cpu"),
    ({"attn_bias": rand(5, 7).to("meta")}, "attn_bias", "meta", "cpu"),
    # Options.
    ({"window": 3}, "window", "3"),
    ({"window": (1,)}, "window", "1"),
    ({"window": (1, 2, 3)}, "window", "1, 2, 3"),
    ({"window": (-1, 0)}, "window", "-1", "None"),
    ({"window": (0, -1)}, "window", "-1", "None"),
    ({"window": (1.5, 0)}, "window", "1.5"),
    ({"scale": "large"}, "scale", "large"),
    ({"scale": nan}, "scale", "nan"),
    ({"scale": 1e39}, "scale", "1e+39", "float32"),
    ({"scale": "0.5"}, "scale", "0.5"),
    ({"scale": b"1"}, "scale", "1"),
    ({"causal": "no"}, "causal", "no", "bool"),
    ({"causal": torch.tensor([True, False])}, "causal", "bool"),
    ({"q_offset": np.array([0])}, "q_offset", "int"),
    ({"query": VALID["query"].to_sparse()}, "query", "torch.sparse_coo"),
    ({"scale": torch.ones(2)}, "scale", "number"),
    ({"scale": rand(()).requires_grad_()}, "scale", "gradient"),
    ({"softcap": 1e-50}, "softcap", "1e-50", "float32"),
    ({"softcap": 1e39}, "softcap", "1e+39", "float32"),
    ({"softcap": -1.0}, "softcap", "-1"),
    ({"softcap": nan}, "softcap", "nan"),
    ({"q_offset": 1.5}, "q_offset", "1.5"),
    ({"q_offset": np.float64(3)}, "q_offset", "int"),
    ({"q_offset": np.bool_(True)}, "q_offset", "int"),
    ({"q_offset": torch.tensor(1.5)}, "q_offset", "int"),
    ({"q_offset": torch.tensor(True)}, "q_offset", "int"),
    ({"q_offset": 2**63}, "q_offset", str(2**63)),
    ({"split_size": 2**70}, "split_size", str(2**70)),
    ({"window": (2**64, 0)}, "window", str(2**64)),
    ({"split_size": 0}, "split_size", "0"),
    ({"split_size": -3}, "split_size", "-3"),
    ({"split_size": 1.5}, "split_size", "1.5"),
    ({"alibi_slopes": [1.0] * 4}, "alibi_slopes", "list"),
    ({"alibi_slopes": rand(2)}, "alibi_slopes", "2", "4"),
    ({"alibi_slopes": rand(3, 4)}, "alibi_slopes", "[3, 4]", "[2, 4]"),
    ({"alibi_slopes": rand(1, 2, 4)}, "alibi_slopes", "[1, 2, 4]", "[4]"),
    ({"alibi_slopes": torch.ones(4).long()}, "alibi_slopes", "int64"),
    ({"alibi_slopes": rand(4).requires_grad_()}, "alibi_slopes", "gradient"),
    ({"sinks": 0.0}, "sinks", "float"),
    ({"sinks": rand(5)}, "sinks", "5", "4"),
    ({"sinks": rand(4, 1)}, "sinks", "[4, 1]"),
    ({"sinks": rand(4).double()}, "sinks", "float64", "float32"),
    ({"sinks": torch.ones(4, dtype=torch.int64)}, "sinks", "int64", "float32"),
    ({"sinks": torch.ones(4, dtype=torch.int32)}, "sinks", "int32"),
    ({"kv_lens": [7, 7]}, "kv_lens", "list"),
    ({"kv_lens": integers(7)}, "kv_lens", "1", "2"),
    ({"kv_lens": integers([7], [7])}, "kv_lens", "2"),
    ({"kv_lens": torch.tensor([7.0, 7.0])}, "kv_lens", "float32", "int32"),
    ({"kv_lens": integers(7, 8)}, "kv_lens", "8", "7"),
    ({"kv_lens": integers(-1, 7)}, "kv_lens", "-1"),
    ({"q_lens": [5, 5]}, "q_lens", "list"),
    ({"q_lens": integers(5)}, "q_lens", "1", "2"),
    ({"q_lens": torch.tensor([5.0, 5.0])}, "q_lens", "float32", "int32"),
    ({"q_lens": integers(5, 6)}, "q_lens", "6", "5"),
    ({"q_lens": integers(-1, 5)}, "q_lens", "-1", "0"),
    ({"kv_starts": [0, 0]}, "kv_starts", "list"),
    ({"kv_starts": integers(0)}, "kv_starts", "1", "2"),
    ({"kv_starts": torch.tensor([0.0, 0.0])}, "kv_starts", "float32", "int32"),
    ({"kv_starts": integers(0, -1)}, "kv_starts", "-1", "0"),
    # Devices.
    ({"key": VALID["key"].to("meta")}, "key", "meta", "cpu"),
    ({"kv_lens": integers(7, 7).to("meta")}, "kv_lens", "meta", "cpu"),
    ({"sinks": rand(4).to("meta")}, "sinks", "meta", "cpu"),
)
def test_attention(change, words):
    refused(attention, VALID, change, *words)


@table(
    ({"sinks": rand(4).double()}, "sinks", "float64", "float16"),
    ({"alibi_slopes": rand(4).double()}, "alibi_slopes", "float64", "float32"),
)
def test_attention_in_half_precision(change, words):
    refused(attention, HALF, change, *words)


def test_options_are_keywords():
    with pytest.raises(TypeError):
        attention(*VALID.values(), None, True)
    with pytest.raises(TypeError, match="dropout"):
        attention(*VALID.values(), dropout=0.1)


VARLEN = {
    "query": rand(30, 4, 8),
    "key": rand(30, 2, 8),
    "value": rand(30, 2, 6),
    "cu_seqlens_q": integers(0, 12, 20, 30),
    "cu_seqlens_k": integers(0, 12, 20, 30),
    "max_seqlen_q": 12,
    "max_seqlen_k": 12,
}


@table(
    ({"query": rand(1, 4, 30, 8)}, "query", "4", "3"),
    ({"key": rand(30, 16)}, "key", "2", "3"),
    ({"value": rand(31, 2, 6)}, "value", "31", "30"),
    ({"query": rand(30, 3, 8)}, "query", "3", "2"),
    ({"key": rand(30, 2, 9)}, "key", "9", "8"),
    ({"cu_seqlens_q": [0, 12, 20, 30]}, "cu_seqlens_q", "list"),
    ({"cu_seqlens_q": None}, "cu_seqlens_q", "NoneType"),
    ({"cu_seqlens_q": torch.tensor([0.0, 12, 20, 30])}, "cu_seqlens_q", "float32", "int32"),
    ({"cu_seqlens_k": integers([0, 30])}, "cu_seqlens_k", "2", "1"),
    ({"cu_seqlens_k": integers(0, 30)}, "cu_seqlens_k", "2", "4"),
    ({"cu_seqlens_q": integers(), "cu_seqlens_k": integers()}, "cu_seqlens_q", "no elements"),
    ({"cu_seqlens_q": integers(1, 12, 20, 30)}, "cu_seqlens_q", "1", "0"),
    ({"cu_seqlens_k": integers(-1, 12, 20, 30)}, "cu_seqlens_k", "-1", "0"),
    ({"cu_seqlens_q": integers(0, 12, 20, 29)}, "cu_seqlens_q", "29", "30"),
    ({"cu_seqlens_k": integers(0, 12, 20, 31)}, "cu_seqlens_k", "31", "30"),
    ({"cu_seqlens_q": integers(0, 12, 8, 30), "max_seqlen_q": 30}, "cu_seqlens_q", "12", "8"),
    ({"cu_seqlens_k": integers(0, 12, 8, 30), "max_seqlen_k": 30}, "cu_seqlens_k", "12", "8"),
    ({"cu_seqlens_k": integers(0, 40, 20, 30), "max_seqlen_k": 40}, "cu_seqlens_k", "40"),
    ({"max_seqlen_q": 11}, "max_seqlen_q", "11", "12"),
    ({"max_seqlen_k": 11}, "max_seqlen_k", "11", "12"),
    ({"max_seqlen_q": -1}, "max_seqlen_q", "-1"),
    ({"max_seqlen_q": None}, "max_seqlen_q", "None"),
    ({"max_seqlen_k": 12.0}, "max_seqlen_k", "12.0"),
    ({"kv_lens": integers(12, 9, 10)}, "kv_lens", "9", "8"),
    ({"kv_lens": integers(12, 8, -1)}, "kv_lens", "-1"),
    ({"kv_starts": integers(0, 0)}, "kv_starts", "2", "3"),
    ({"kv_starts": integers(0, -1, 0)}, "kv_starts", "-1"),
    ({"kv_lens": integers(12, 8)}, "kv_lens", "2", "3"),
    ({"sinks": rand(5)}, "sinks", "5", "4"),
    ({"window": (-1, -1)}, "window", "-1", "None"),
)
def test_varlen(change, words):
    refused(attention_varlen, VARLEN, change, *words)


STEP = {
    "query": rand(8, 4, 8),
    "key": rand(6, 4, 2, 8),
    "value": rand(6, 4, 2, 6),
    "cu_seqlens_q": integers(0, 5, 8),
    "max_seqlen_q": 5,
    "block_table": integers([5, 1, 2], [0, 3, -1]),
    "kv_lens": integers(12, 7),
}


@table(
    ({"key": rand(24, 2, 8)}, "key", "3", "4"),
    ({"value": rand(7, 4, 2, 6)}, "value", "7", "6"),
    ({"query": rand(1, 4, 8, 8)}, "query", "4", "3"),
    ({"cu_seqlens_k": integers(0, 4, 8)}, "block_table", "cu_seqlens_k"),
    ({"cu_seqlens_q": integers(0, 5, 9)}, "cu_seqlens_q", "9", "8"),
    ({"cu_seqlens_q": integers(0, 8)}, "block_table", "2", "1"),
    ({"max_seqlen_q": 4}, "max_seqlen_q", "4", "5"),
    ({"kv_lens": None}, "kv_lens", "missing"),
    ({"kv_lens": integers(13, 7)}, "kv_lens", "13", "12"),
    ({"kv_lens": integers(12, 9)}, "block_table", "-1"),
    ({"block_table": None}, "max_seqlen_k", "None"),
)
def test_varlen_in_pages(change, words):
    refused(attention_varlen, STEP, change, *words)


PAGED = {
    "query": rand(2, 4, 3, 8),
    "key_pages": rand(6, 4, 2, 8),
    "value_pages": rand(6, 4, 2, 6),
    "block_table": integers([5, 1, 2], [0, 3, -1]),
    "kv_lens": integers(12, 7),
}


@table(
    ({"key_pages": rand(6, 4, 16)}, "key_pages", "3", "4"),
    ({"value_pages": rand(7, 4, 2, 6)}, "value_pages", "7", "6"),
    ({"value_pages": rand(6, 5, 2, 6)}, "value_pages", "5", "4"),
    ({"value_pages": rand(6, 4, 4, 6)}, "value_pages", "4", "2"),
    ({"key_pages": rand(6, 4, 2, 9)}, "key_pages", "9", "8"),
    ({"key_pages": rand(6, 4, 2, 8).half()}, "key_pages", "float16", "float32"),
    ({"key_pages": rand(6, 0, 2, 8), "value_pages": rand(6, 0, 2, 6)}, "kv_lens", "12", "0"),
    ({"query": rand(2, 3, 3, 8)}, "query", "3", "2"),
    ({"block_table": [[5, 1, 2], [0, 3, -1]]}, "block_table", "list"),
    ({"block_table": torch.ones(2, 3)}, "block_table", "float32", "int32"),
    ({"block_table": integers(5, 1, 2)}, "block_table", "1", "2"),
    ({"block_table": integers([5, 1, 2])}, "block_table", "1", "2"),
    ({"block_table": integers([5, 1, 6], [0, 3, -1])}, "block_table", "6"),
    ({"block_table": integers([5, -1, 2], [0, 3, -1])}, "block_table", "-1"),
    ({"block_table": integers([5, 1, 2], [0, 2**31 - 1, -1])}, "block_table", "2147483647"),
    ({"block_table": integers([5, 1, 2], [0, 2**40, -1], dtype=torch.int64)}, "block_table", "1099511627776"),
    ({"kv_lens": None}, "kv_lens", "NoneType"),
    ({"kv_lens": integers(13, 7)}, "kv_lens", "13", "12"),
    ({"kv_lens": integers(12, -7)}, "kv_lens", "-7"),
    ({"kv_lens": integers(12, 9)}, "block_table", "-1"),
    ({"block_table": integers([0], [0]).expand(2, 2**61)}, "block_table", str(2**61)),
    ({"kv_lens": integers(12, 7, 7)}, "kv_lens", "3", "2"),
    ({"attn_mask": rand(3, 11)}, "attn_mask", "11", "12"),
    ({"attn_bias": rand(3, 11)}, "attn_bias", "11", "12"),
)
def test_paged(change, words):
    refused(attention_paged, PAGED, change, *words)


MERGE = {"outs": [rand(2, 3, 4, 5), rand(2, 3, 4, 5)], "lses": [rand(2, 3, 4), rand(2, 3, 4)]}


@table(
    ({"outs": [], "lses": []}, "outs", "no states"),
    ({"outs": MERGE["outs"][:1]}, "(outs|lses)", "1", "2"),
    ({"outs": [1.0, 2.0]}, "outs", "float"),
    ({"lses": 1.0}, "lses", "float"),
    ({"outs": [rand(4, 5), rand(4, 5)]}, "outs", "2"),
    ({"outs": [MERGE["outs"][0], rand(2, 3, 4, 6)]}, "outs", "6", "5"),
    ({"lses": [MERGE["lses"][0], rand(2, 3, 5)]}, "lses", "5", "4"),
    ({"lses": [rand(2, 4, 3), rand(2, 4, 3)]}, "lses", "4", "3"),
    ({"lses": [rand(2, 3), rand(2, 3)]}, "lses", "2", "3"),
    ({"outs": [MERGE["outs"][0], MERGE["outs"][1].half()]}, "outs", "float16", "float32"),
    ({"lses": [x.half() for x in MERGE["lses"]]}, "lses", "float16", "float32"),
    ({"lses": [MERGE["lses"][0], MERGE["lses"][1].double()]}, "lses", "float64", "float32"),
    ({"outs": [x.long() for x in MERGE["outs"]]}, "outs", "int64"),
    ({"outs": [MERGE["outs"][0], MERGE["outs"][1].to("meta")]}, "outs", "meta", "cpu"),
)
def test_merge(change, words):
    refused(merge, MERGE, change, *words)


BAD_TENSORS = {
    "none": lambda x: None,
    "empty": lambda x: x[..., :0],
    "no-batch": lambda x: x[:0],
    "longer": lambda x: torch.cat([x, x], -1),
    "more": lambda x: torch.cat([x, x]),
    "fewer-dims": lambda x: x[0],
    "scalar": lambda x: x.flatten()[0],
    "more-dims": lambda x: x[None],
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "int": lambda x: x.int(),
    "bool": lambda x: x > 0,
    "complex": lambda x: x.to(torch.complex64),
    "transposed": lambda x: x.transpose(0, -1),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "negative": lambda x: ~x if x.dtype == torch.bool else -1 - x.float().to(x.dtype),
    "huge": lambda x: x.long() * 10**12 + 10**15 if not x.is_floating_point() else x * 1e30,
    "list": lambda x: [x],
}
BAD_NUMBERS = [
    -1,
    0,
    1,
    6,
    10**6,
    2**31,
    2**62,
    -(2**63),
    2**63 - 1,
    float("nan"),
    float("inf"),
    None,
    "7",
]


KINDS = {
    "dense": lambda: operators.attention(
        attn_mask=rand(2, 1, 5, 9) > 0,
        attn_bias=rand(2, 4, 5, 9),
        alibi_slopes=rand(4),
        sinks=rand(4),
        kv_lens=integers(9, 3),
        kv_starts=integers(2, 0),
        q_lens=integers(5, 3),
    ),
    "varlen": lambda: operators.attention("varlen", alibi_slopes=rand(2, 4), kv_lens=integers(4, 3)),
    "paged": lambda: operators.attention("paged", attn_bias=rand(2, 4, 5, 9)),
}


class TestOperators:
    """torch.ops.flashsoftmax called directly: an exception or an answer, never a crash."""

    def attempt(self, operator, arguments):
        with contextlib.suppress(ValueError, RuntimeError, TypeError, IndexError, NotImplementedError):
            operator(*arguments.values())

    def corruptions(self, arguments):
        for name, x in arguments.items():
            if isinstance(x, torch.Tensor):
                yield from (arguments | {name: corrupt(x)} for corrupt in BAD_TENSORS.values())
            else:
                yield from (arguments | {name: value} for value in (*BAD_NUMBERS, rand(3)))

    @pytest.mark.parametrize("kind", KINDS)
    def test_attention(self, kind):
        operator, valid = torch.ops.flashsoftmax.attention, KINDS[kind]()
        assert operator(*valid.values())[0].shape == (*valid["query"].shape[:3], 6)
        for arguments in self.corruptions(valid):
            self.attempt(operator, arguments)

    @pytest.mark.parametrize("kind", ["dense", "varlen"])
    def test_attention_backward(self, kind):
        forward = KINDS[kind]()
        out, lse, lse_error = torch.ops.flashsoftmax.attention(*forward.values())
        valid = operators.attention_backward(forward, rand(out.shape), rand(lse.shape), out, lse, lse_error)
        operator = torch.ops.flashsoftmax.attention_backward
        gradients = operator(*valid.values())
        assert [g.shape for g in gradients[:3]] == [forward[name].shape for name in ("query", "key", "value")]
        for arguments in self.corruptions(valid):
            self.attempt(operator, arguments)

    def test_merge(self):
        outs, lses = [rand(2, 3, 4, 5) for _ in range(2)], [rand(2, 3, 4) for _ in range(2)]
        forward, backward = torch.ops.flashsoftmax.merge, torch.ops.flashsoftmax.merge_backward
        out, lse = forward(outs, lses)
        states = {"outs": outs, "lses": lses}
        grads = {"grad_out": rand(out.shape), "grad_lse": rand(lse.shape)}
        for operator, valid in ((forward, states), (backward, grads | states)):
            operator(*valid.values())
            for name in states:
                first, second = valid[name]
                for corrupt in BAD_TENSORS.values():
                    for pair in (
                        (corrupt(first), second),
                        (first, corrupt(second)),
                        (corrupt(first), corrupt(second)),
                    ):
                        self.attempt(operator, valid | {name: list(pair)})
                for bad in ([], [first], [first] * 3, None, 3.0):
                    self.attempt(operator, valid | {name: bad})
            for arguments in self.corruptions({name: x for name, x in valid.items() if name not in states}):
                self.attempt(operator, valid | arguments)

    @pytest.mark.parametrize(
        ("kind", "name", "value"),
        [
            ("dense", "kv_lens", integers(10, 3)),
            ("dense", "kv_lens", integers(-1, 3)),
            ("dense", "split_size", 0),
            ("dense", "window_left", -1),
            ("dense", "attn_mask", rand(1, 4, 5, 9)),
            ("dense", "attn_bias", rand(1, 2, 5, 9)),
            ("dense", "attn_bias", rand(2, 4, 5, 9).long()),
            ("dense", "dropout_p", 0.5),
            ("varlen", "cu_seqlens_q", integers(0, 12, 9)),
            ("varlen", "cu_seqlens_q", integers(3, 5, 9)),
            ("varlen", "cu_seqlens_k", integers(0, 4, 10)),
            ("varlen", "cu_seqlens_k", None),
            ("varlen", "block_table", integers([0, 0], [0, 0])),
            ("paged", "cu_seqlens_k", integers(0, 4, 9)),
            ("varlen", "max_seqlen_q", 4),
            ("varlen", "max_seqlen_k", 4),
            ("varlen", "kv_lens", integers(4, 6)),
            ("varlen", "q_lens", integers(5, 4)),
            ("varlen", "query", rand(2, 4, 9, 8)),
            ("varlen", "attn_mask", rand(1, 4, 9, 9) > 0),
            ("varlen", "attn_bias", rand(1, 4, 9, 9)),
            ("paged", "block_table", integers([2, 0, 4], [1, 2, -1])),
            ("paged", "block_table", integers([2, 0, -1], [1, 2, -1])),
            ("paged", "kv_lens", integers(10, 5)),
            ("paged", "kv_lens", None),
        ],
    )
    def test_refuses(self, kind, name, value):
        valid = KINDS[kind]()
        with pytest.raises(ValueError, match=name):
            torch.ops.flashsoftmax.attention(*(valid | {name: value}).values())
