"""Sequences of different lengths, one after another in one tensor, against dense attention on each."""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import pytest
import torch

import reference
from cases import LAYOUTS, NAN, Case
from checks import assert_same_bits, check_backward, check_forward, gradients, random_gradients
from flashsoftmax import attention, attention_varlen

WRT = ["query", "key", "value"]


def offsets(lengths, dtype=torch.int32):
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


@dataclass(frozen=True)
class Sequences:
    id: str
    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    dim: int = 32
    value_dim: int = 24
    options: tuple[tuple[str, object], ...] = ()
    alibi: bool | str = False  # "per-sequence": slopes [sequences, heads]
    sinks: bool = False
    kv_lens: tuple[int, ...] | None = None  # what lies beyond is NaN
    kv_starts: tuple[int, ...] | None = None  # what lies before is NaN
    layout: str = "contiguous"

    def inputs(self, dtype, device="cpu"):
        (query_heads, key_heads), layout = self.heads, LAYOUTS[self.layout]
        tensors = {
            "query": torch.randn(1, query_heads, sum(self.lens_q), self.dim),
            "key": torch.randn(1, key_heads, sum(self.lens_k), self.dim),
            "value": torch.randn(1, key_heads, sum(self.lens_k), self.value_dim),
        }
        if self.alibi:
            tensors["alibi_slopes"] = 2.0 ** -torch.arange(1, query_heads + 1)
        if self.alibi == "per-sequence":
            tensors["alibi_slopes"] = tensors["alibi_slopes"] * torch.rand(len(self.lens_q), 1)
        if self.sinks:
            tensors["sinks"] = torch.randn(query_heads)
        tensors |= {"cu_seqlens_q": offsets(self.lens_q), "cu_seqlens_k": offsets(self.lens_k)}
        if self.kv_lens:
            tensors["kv_lens"] = torch.tensor(self.kv_lens)
            for end, whole, used in zip(tensors["cu_seqlens_k"][1:], self.lens_k, self.kv_lens, strict=True):
                for name in ("key", "value"):
                    tensors[name][:, :, end - whole + used : end] = NAN
        if self.kv_starts:
            tensors["kv_starts"] = torch.tensor(self.kv_starts)
            for begin, start in zip(tensors["cu_seqlens_k"], self.kv_starts, strict=False):
                for name in ("key", "value"):
                    tensors[name][:, :, begin : begin + start] = NAN
        tensors = {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in tensors.items()}
        tensors |= {name: layout(tensors[name]).squeeze(0).transpose(0, 1) for name in WRT}
        lengths = {"max_seqlen_q": max(self.lens_q, default=0), "max_seqlen_k": max(self.lens_k, default=0)}
        return tensors | lengths | dict(self.options)


def dense(
    query,
    key,
    value,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    max_seqlen_q,
    max_seqlen_k,
    kv_lens=None,
    kv_starts=None,
    split_size=None,
    **options,
):
    outs, lses = [query.new_empty(0, query.shape[1], value.shape[2])], [query.new_empty(query.shape[1], 0)]
    for i in range(len(cu_seqlens_q) - 1):
        q, k = (slice(cu[i], cu[i + 1]) for cu in (cu_seqlens_q, cu_seqlens_k))
        lens = {} if kv_lens is None else {"kv_lens": kv_lens[i : i + 1]}
        if options.get("alibi_slopes") is not None and options["alibi_slopes"].dim() == 2:
            lens["alibi_slopes"] = options["alibi_slopes"][i : i + 1]
        lens |= {} if kv_starts is None else {"kv_starts": kv_starts[i : i + 1]}
        out, lse = reference.attention(
            *(x.transpose(0, 1)[None] for x in (query[q], key[k], value[k])), **options | lens
        )
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat([x.to(lses[-1].dtype) for x in lses], 1)


def call(**inputs):
    return attention_varlen(**inputs, return_lse=True)


def options(**given):
    return tuple(given.items())


SEQUENCES = [
    Sequences("one", (33,), (70,)),
    Sequences("several", (5, 70, 1, 130), (9, 70, 33, 131)),
    Sequences("causal", (5, 70, 1, 40), (9, 70, 33, 20), options=options(causal=True)),
    Sequences("without-queries", (1, 0, 1), (3, 0, 5), (9, 3), 64, options=options(causal=True, scale=1.0)),
    Sequences("without-keys", (2, 3, 20), (4, 0, 20), options=options(causal=True)),
    Sequences("empty-at-both-ends", (0, 0, 7, 0), (0, 5, 7, 0)),
    Sequences("empty-but-for-one-token", (0, 0, 0, 1), (0, 0, 0, 1), (21, 7), 120),
    Sequences("window", (50, 3, 80), (50, 40, 90), options=options(window=(10, 4))),
    Sequences("offset", (50, 3, 20), (50, 40, 90), options=options(causal=True, q_offset=7)),
    Sequences(
        "softcap-alibi-sinks",
        (50, 3),
        (50, 40),
        alibi=True,
        sinks=True,
        options=options(causal=True, softcap=2.0, scale=0.4),
    ),
    Sequences("lengths", (50, 3, 2, 4), (50, 40, 30, 4), options=options(causal=True), kv_lens=(33, 40, 0, 3)),
    Sequences("starts", (50, 3, 20), (50, 40, 30), options=options(causal=True), kv_starts=(7, 20, 30)),
    Sequences("decode-starts", (1, 2, 16), (300, 200, 70), kv_starts=(129, 0, 69), options=options(split_size=32)),
    Sequences("alibi-per-sequence", (50, 3, 2), (50, 40, 3), alibi="per-sequence"),
    Sequences("lengths-1-and-3", (3, 3), (3, 3), dim=64, kv_lens=(1, 3)),
    Sequences(
        "one-of-qkv",
        (20, 40),
        (20, 40),
        (2, 2),
        value_dim=32,
        options=options(causal=True),
        layout="one-of-qkv",
    ),
    Sequences("heads-outermost", (20, 40), (20, 41), layout="contiguous"),
    Sequences("tokens-outermost", (20, 40), (20, 41), layout="heads-in-rows"),
    Sequences("dim-not-last", (20, 40), (20, 41), layout="dim-not-last"),
    Sequences("decode", (1, 1, 1), (300, 1, 70)),
    Sequences("decode-splits", (1, 2, 0, 16), (300, 200, 5, 70), options=options(causal=True, split_size=32)),
    Sequences(
        "decode-splits-all",
        (1, 2, 4),
        (300, 200, 70),
        alibi=True,
        sinks=True,
        kv_lens=(290, 3, 0),
        options=options(window=(100, 0), softcap=3.0, split_size=64),
    ),
]
EACH = pytest.mark.parametrize("sequences", SEQUENCES, ids=lambda sequences: sequences.id)


@EACH
def test_forward(sequences, dtype, device):
    check_forward(call, partial(sequences.inputs, dtype, device), dense)


@EACH
def test_backward(sequences, dtype, device):
    check_backward(call, partial(sequences.inputs, dtype, device), dense)


@pytest.mark.parametrize("lens", [(), (0,), (0, 0)], ids=str)
def test_no_tokens_at_all(lens, dtype):
    inputs = Sequences("", lens, lens).inputs(dtype)
    out, lse = call(**inputs)
    assert out.shape == (0, 4, 24) and lse.shape == (4, 0)
    for name, gradient in zip(WRT, gradients(call, inputs, (out, lse), WRT), strict=True):
        assert gradient.shape == inputs[name].shape


def test_the_offsets_may_be_int32_or_int64_of_any_stride(dtype):
    inputs = SEQUENCES[1].inputs(dtype)
    out = call(**inputs)
    for change in (
        torch.Tensor.long,
        lambda cu: torch.stack([cu, cu], 1)[:, 0],
        lambda cu: cu.long().repeat_interleave(3)[::3],
    ):
        assert_same_bits(
            call(**inputs | {name: change(inputs[name]) for name in ("cu_seqlens_q", "cu_seqlens_k")}), out
        )


@pytest.mark.parametrize("lens_k", [(70,), (300,)])
def test_one_sequence_is_attention(lens_k, dtype):
    sequences = Sequences("", (40,), lens_k, options=options(causal=True))
    inputs = sequences.inputs(dtype)
    out, lse = attention(*(inputs[name].transpose(0, 1)[None] for name in WRT), causal=True, return_lse=True)
    assert_same_bits(call(**inputs), (out[0].transpose(0, 1), lse[0]))


@pytest.mark.parametrize("lens_q", [(40, 7), (3, 7)], ids=["tiled", "decode"])
def test_a_larger_maximum_of_keys_changes_no_bit(lens_q, dtype):
    """The kernel depends on max_seqlen_q alone."""
    inputs = Sequences("", lens_q, (90, 50)).inputs(dtype)
    assert_same_bits(call(**inputs | {"max_seqlen_k": 5000}), call(**inputs))


@EACH
def test_float64_gradients(sequences):
    inputs = sequences.inputs(torch.float64)
    grads, wrt = random_gradients(call, inputs), WRT + (["sinks"] if sequences.sinks else [])
    torch.testing.assert_close(gradients(call, inputs, grads, wrt), gradients(dense, inputs, grads, wrt))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout, dtype):
    case = Case("", heads=(4, 2), rows=25, keys=30, dim=8, layout=layout).inputs(dtype)
    inputs = {name: case[name].squeeze(0).transpose(0, 1) for name in WRT}
    inputs |= {
        "cu_seqlens_q": offsets((5, 20)),
        "cu_seqlens_k": offsets((5, 25)),
        "max_seqlen_q": 20,
        "max_seqlen_k": 25,
    }
    contiguous = inputs | {name: inputs[name].contiguous() for name in WRT}
    out, lse = call(**contiguous)
    assert_same_bits(call(**inputs), (out, lse))
    grads = torch.randn_like(out), torch.randn_like(lse)
    assert_same_bits(gradients(call, inputs, grads, WRT), gradients(call, contiguous, grads, WRT))
