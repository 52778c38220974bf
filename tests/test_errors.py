"""Bad input is refused with the argument, what was found, what is wanted. Nothing crashes, whatever comes."""

import re

import pytest
import torch
from torch import nan

from flashsoftmax import attention, attention_paged, attention_varlen, merge

rand = torch.randn


def integers(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def refused(call, valid, change, *words):
    """`words` occur in the message in that order; the first is the argument's name."""
    call(**valid)
    with pytest.raises((ValueError, TypeError)) as error:
        call(**valid | change)
    assert re.search(
        ".*".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in words), str(error.value), re.DOTALL
    ), str(error.value)


def table(*rows):
    return pytest.mark.parametrize(
        ("change", "words"), [pytest.param(c, w, id="-".join(w)) for c, *w in rows]
    )


VALID = {"query": rand(2, 4, 5, 8), "key": rand(2, 2, 7, 8), "value": rand(2, 2, 7, 6)}
HALF = {name: x.half() for name, x in VALID.items()}


@table(
    # Type, rank, dtype.
    ({"query": [[1.0]]}, "query", "list"),
    ({"key": None}, "key", "None"),
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
    ({"attn_mask": rand(7)}, "attn_mask", "1"),
    ({"attn_mask": rand(1, 1, 1, 5, 7)}, "attn_mask", "5"),
    ({"attn_mask": rand(5, 6)}, "attn_mask", "6", "7"),
    ({"attn_mask": rand(4, 7)}, "attn_mask", "4", "5"),
    ({"attn_mask": rand(2, 2, 5, 7)}, "attn_mask", "2", "4"),
    ({"attn_mask": rand(3, 1, 5, 7)}, "attn_mask", "3", "2"),
    # Options.
    ({"window": 3}, "window", "3"),
    ({"window": (1,)}, "window", "1"),
    ({"window": (1, 2, 3)}, "window", "1, 2, 3"),
    ({"window": (-1, 0)}, "window", "-1", "None"),
    ({"window": (0, -1)}, "window", "-1", "None"),
    ({"window": (1.5, 0)}, "window", "1.5"),
    ({"scale": "large"}, "scale", "large"),
    ({"scale": nan}, "scale", "nan"),
    ({"softcap": -1.0}, "softcap", "-1"),
    ({"softcap": nan}, "softcap", "nan"),
    ({"q_offset": 1.5}, "q_offset", "1.5"),
    ({"split_size": 0}, "split_size", "0"),
    ({"split_size": -3}, "split_size", "-3"),
    ({"split_size": 1.5}, "split_size", "1.5"),
    ({"alibi_slopes": [1.0] * 4}, "alibi_slopes", "list"),
    ({"alibi_slopes": rand(2)}, "alibi_slopes", "2", "4"),
    ({"alibi_slopes": rand(2, 4)}, "alibi_slopes", "2"),
    ({"alibi_slopes": torch.ones(4).long()}, "alibi_slopes", "int64"),
    ({"alibi_slopes": rand(4).requires_grad_()}, "alibi_slopes", "gradient"),
    ({"sinks": 0.0}, "sinks", "float"),
    ({"sinks": rand(5)}, "sinks", "5", "4"),
    ({"sinks": rand(4, 1)}, "sinks", "2"),
    ({"sinks": rand(4).half()}, "sinks", "float16", "float32"),
    ({"sinks": torch.ones(4, dtype=torch.int32)}, "sinks", "int32"),
    ({"kv_lens": [7, 7]}, "kv_lens", "list"),
    ({"kv_lens": integers(7)}, "kv_lens", "1", "2"),
    ({"kv_lens": integers([7], [7])}, "kv_lens", "2"),
    ({"kv_lens": torch.tensor([7.0, 7.0])}, "kv_lens", "float32", "int32"),
    ({"kv_lens": integers(7, 8)}, "kv_lens", "8", "7"),
    ({"kv_lens": integers(-1, 7)}, "kv_lens", "-1"),
    # Devices.
    ({"key": VALID["key"].to("meta")}, "key", "meta", "cpu"),
    ({"kv_lens": integers(7, 7).to("meta")}, "kv_lens", "meta", "cpu"),
    ({"sinks": rand(4).to("meta")}, "sinks", "meta", "cpu"),
)
def test_attention(change, words):
    refused(attention, VALID, change, *words)


@table(
    ({"sinks": rand(4).double()}, "sinks", "float64", "float16"),
    ({"alibi_slopes": rand(4).bfloat16()}, "alibi_slopes", "bfloat16", "float16"),
    ({"attn_mask": rand(5, 7).bfloat16()}, "attn_mask", "bfloat16", "float16"),
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
    ({"cu_seqlens_q": None}, "cu_seqlens_q", "None"),
    ({"cu_seqlens_q": torch.tensor([0.0, 12, 20, 30])}, "cu_seqlens_q", "float32", "int32"),
    ({"cu_seqlens_k": integers([0, 30])}, "cu_seqlens_k", "2", "1"),
    ({"cu_seqlens_k": integers(0, 30)}, "cu_seqlens_k", "2", "4"),
    ({"cu_seqlens_q": integers(), "cu_seqlens_k": integers()}, "cu_seqlens_q", "0"),
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
    ({"max_seqlen_k": 12.0}, "max_seqlen_k", "12.0"),
    ({"kv_lens": integers(12, 9, 10)}, "kv_lens", "9", "8"),
    ({"kv_lens": integers(12, 8, -1)}, "kv_lens", "-1"),
    ({"kv_lens": integers(12, 8)}, "kv_lens", "2", "3"),
    ({"sinks": rand(5)}, "sinks", "5", "4"),
    ({"window": (-1, -1)}, "window", "-1", "None"),
)
def test_varlen(change, words):
    refused(attention_varlen, VARLEN, change, *words)


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
    ({"key_pages": rand(6, 0, 2, 8), "value_pages": rand(6, 0, 2, 6)}, "key_pages", "0"),
    ({"query": rand(2, 3, 3, 8)}, "query", "3", "2"),
    ({"block_table": [[5, 1, 2], [0, 3, -1]]}, "block_table", "list"),
    ({"block_table": torch.ones(2, 3)}, "block_table", "float32", "int32"),
    ({"block_table": integers(5, 1, 2)}, "block_table", "1", "2"),
    ({"block_table": integers([5, 1, 2])}, "block_table", "1", "2"),
    ({"block_table": integers([5, 1, 6], [0, 3, -1])}, "block_table", "6"),
    ({"block_table": integers([5, -1, 2], [0, 3, -1])}, "block_table", "-1"),
    ({"block_table": integers([5, 1, 2], [0, 2**31 - 1, -1])}, "block_table", "2147483647"),
    ({"block_table": integers([5, 1, 2], [0, 2**40, -1], dtype=torch.int64)}, "block_table", "1099511627776"),
    ({"kv_lens": None}, "kv_lens", "None"),
    ({"kv_lens": integers(13, 7)}, "kv_lens", "13", "12"),
    ({"kv_lens": integers(12, -7)}, "kv_lens", "-7"),
    ({"kv_lens": integers(12, 9)}, "block_table", "-1"),
    ({"kv_lens": integers(12, 7, 7)}, "kv_lens", "3", "2"),
    ({"attn_mask": rand(3, 11)}, "attn_mask", "11", "12"),
)
def test_paged(change, words):
    refused(attention_paged, PAGED, change, *words)


MERGE = {"outs": [rand(2, 3, 4, 5), rand(2, 3, 4, 5)], "lses": [rand(2, 3, 4), rand(2, 3, 4)]}


@table(
    ({"outs": [], "lses": []}, "outs", "0"),
    ({"outs": MERGE["outs"][:1]}, "outs", "1", "2"),
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
    "negative": lambda x: -x - 1,
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


class TestOperators:
    """torch.ops.flashsoftmax called directly: an exception or an answer, never a crash."""

    REFUSED = (ValueError, RuntimeError, TypeError, IndexError, NotImplementedError)

    def arguments(self, kind):
        base = dict.fromkeys(
            ("attn_mask", "alibi_slopes", "sinks", "kv_lens", "cu_seqlens_q", "cu_seqlens_k", "block_table")
        )
        sizes = {
            "max_seqlen_q": 5,
            "max_seqlen_k": 7,
            "scale": 0.3,
            "softcap": 0.0,
            "window_left": None,
            "window_right": None,
            "q_offset": None,
        }
        if kind == "dense":
            tensors = {
                "query": rand(2, 4, 5, 8),
                "key": rand(2, 2, 7, 8),
                "value": rand(2, 2, 7, 6),
                "attn_mask": rand(2, 1, 5, 7),
            }
            tensors |= {"alibi_slopes": rand(4), "sinks": rand(4), "kv_lens": integers(7, 3)}
        elif kind == "varlen":
            tensors = {"query": rand(1, 4, 9, 8), "key": rand(1, 2, 9, 8), "value": rand(1, 2, 9, 6)}
            tensors |= {
                "kv_lens": integers(5, 3),
                "cu_seqlens_q": integers(0, 5, 9),
                "cu_seqlens_k": integers(0, 5, 9),
            }
        else:
            tensors = {"query": rand(2, 4, 5, 8), "key": rand(6, 2, 4, 8), "value": rand(6, 2, 4, 6)}
            tensors |= {"block_table": integers([5, 1], [0, 3]), "kv_lens": integers(7, 3)}
            sizes["max_seqlen_k"] = 8
        return base | tensors | sizes

    def attempt(self, operator, arguments):
        try:
            results = operator(*arguments.values())
        except self.REFUSED:
            return None
        return results

    def corruptions(self, arguments):
        for name, x in arguments.items():
            bad = BAD_TENSORS.values() if isinstance(x, torch.Tensor) else []
            for corrupt in bad:
                yield arguments | {name: corrupt(x)}
            if not isinstance(x, torch.Tensor):
                yield from (arguments | {name: value} for value in BAD_NUMBERS)
                yield arguments | {name: rand(3)}

    @pytest.mark.parametrize("kind", ["dense", "varlen", "paged"])
    def test_attention(self, kind):
        operator, valid = torch.ops.flashsoftmax.attention, self.arguments(kind) | {"split_size": None}
        shape = operator(*valid.values())[0].shape
        assert shape == (*valid["query"].shape[:3], 6)
        for arguments in self.corruptions(valid):
            self.attempt(operator, arguments)

    @pytest.mark.parametrize("kind", ["dense", "varlen", "paged"])
    def test_attention_backward(self, kind):
        forward = self.arguments(kind)
        out, lse = torch.ops.flashsoftmax.attention(*forward.values(), None)
        inputs = {name: forward.pop(name) for name in ("query", "key", "value")}
        valid = {
            "grad_out": rand(out.shape),
            "grad_lse": rand(lse.shape),
            **inputs,
            "out": out,
            "lse": lse,
            **forward,
        }
        valid["mask_grad"] = kind == "dense"
        operator = torch.ops.flashsoftmax.attention_backward
        if kind == "paged":
            with pytest.raises(self.REFUSED):
                operator(*valid.values())
        else:
            gradients = operator(*valid.values())
            assert [g.shape for g in gradients[:3]] == [x.shape for x in inputs.values()]
        for arguments in self.corruptions(valid):
            self.attempt(operator, arguments)

    def test_merge(self):
        outs, lses = [rand(2, 3, 4, 5) for _ in range(2)], [rand(2, 3, 4) for _ in range(2)]
        operators = torch.ops.flashsoftmax
        out, lse = operators.merge(outs, lses)
        backward = {
            "grad_out": rand(out.shape),
            "grad_lse": rand(lse.shape),
            "outs": outs,
            "lses": lses,
            "out": out,
            "lse": lse,
        }
        for operator, valid in (
            (operators.merge, {"outs": outs, "lses": lses}),
            (operators.merge_backward, backward),
        ):
            operator(*valid.values())
            for name, x in valid.items():
                for corrupt in BAD_TENSORS.values():
                    if isinstance(x, torch.Tensor):
                        self.attempt(operator, valid | {name: corrupt(x)})
                    else:
                        self.attempt(operator, valid | {name: [corrupt(x[0]), x[1]]})
                        self.attempt(operator, valid | {name: [x[0], corrupt(x[1])]})
                        self.attempt(operator, valid | {name: [corrupt(x[0]), corrupt(x[1])]})
                for bad in ([], x[:1], [x[0]] * 3, None, 3.0):
                    self.attempt(operator, valid | {name: bad})

    @pytest.mark.parametrize(
        ("kind", "change"),
        [
            ("dense", {"kv_lens": integers(8, 3)}),
            ("dense", {"kv_lens": integers(-1, 3)}),
            ("dense", {"max_seqlen_q": 6}),
            ("dense", {"split_size": 0}),
            ("dense", {"window_left": -1}),
            ("varlen", {"cu_seqlens_q": integers(0, 12, 9)}),
            ("varlen", {"cu_seqlens_q": integers(3, 5, 9)}),
            ("varlen", {"cu_seqlens_k": integers(0, 5, 10)}),
            ("varlen", {"cu_seqlens_k": None}),
            ("varlen", {"max_seqlen_q": 4}),
            ("varlen", {"max_seqlen_k": 4}),
            ("varlen", {"kv_lens": integers(5, 5)}),
            ("varlen", {"query": rand(2, 4, 9, 8)}),
            ("varlen", {"attn_mask": rand(1, 1, 9, 9)}),
            ("paged", {"block_table": integers([5, 6], [0, 3])}),
            ("paged", {"block_table": integers([5, -1], [0, 3])}),
            ("paged", {"kv_lens": integers(9, 3)}),
            ("paged", {"kv_lens": None}),
            ("paged", {"cu_seqlens_q": integers(0, 5, 5), "cu_seqlens_k": integers(0, 5, 5)}),
        ],
        ids=str,
    )
    def test_refuses(self, kind, change):
        valid = self.arguments(kind) | {"split_size": None}
        (name,) = list(change)[:1]
        with pytest.raises(ValueError, match=name):
            torch.ops.flashsoftmax.attention(*(valid | change).values())
