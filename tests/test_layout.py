"""Strides, offsets, broadcast and overlap change nothing: every answer has the bits of the contiguous one."""

import pytest
import torch
from torch.testing import assert_close

from cases import LAYOUTS, Case
from checks import assert_same_bits, gradients, random_gradients
from flashsoftmax import attention

ROWS = pytest.mark.parametrize("rows", [3, 40], ids=["decode", "tiled"])
WRT = ["query", "key", "value"]
call = Case("", split_size=128).call(attention)


def on_interpreter(dtype=torch.float16, tensors=tuple(WRT), **parameters):
    return dtype == torch.float16 and tensors == tuple(WRT)


def make(rows, dtype=torch.float32, device="cpu", **options):
    sizes = {"batch": 2, "heads": (4, 2), "rows": rows, "keys": 140, "dim": 24, "value_dim": 40}
    return Case("", **sizes | options).inputs(dtype, device)


def check_same_bits(inputs, wrt=WRT):
    """As where every tensor is contiguous, forward and backward."""
    contiguous = {
        name: x.clone(memory_format=torch.contiguous_format) if isinstance(x, torch.Tensor) else x
        for name, x in inputs.items()
    }
    grads = random_gradients(call, contiguous)
    assert_same_bits(call(**inputs), call(**contiguous))
    assert_same_bits(gradients(call, inputs, grads, wrt), gradients(call, contiguous, grads, wrt))


@ROWS
@pytest.mark.parametrize("tensors", [("query",), ("key",), ("value",), ("query", "key", "value")], ids="-".join)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout, tensors, rows, dtype, device):
    inputs = make(rows, dtype, device)
    check_same_bits(inputs | {name: LAYOUTS[layout](inputs[name]) for name in tensors})


@ROWS
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_the_mask(layout, kind, rows, dtype, device):
    inputs = make(rows, dtype, device, mask=kind)
    check_same_bits(inputs | {"attn_mask": LAYOUTS[layout](inputs["attn_mask"])})


@ROWS
@pytest.mark.parametrize("expanded", [0, 1, 2, 3], ids=["batch", "heads", "rows", "dim"])
@pytest.mark.parametrize("tensor", [*WRT, "attn_mask"])
def test_broadcast(tensor, expanded, rows, dtype, device):
    inputs = make(rows, dtype, device, mask="float")
    x = inputs[tensor].narrow(expanded, 0, 1).expand_as(inputs[tensor])
    check_same_bits(inputs | {tensor: x})


@pytest.mark.parametrize("keys", [16, 33, 65])
def test_one_key_head_expanded_to_all_and_an_expanded_mask(keys, dtype, device):
    inputs = Case("", heads=(16, 1), rows=1, keys=keys, dim=128).inputs(dtype, device)
    inputs |= {name: inputs[name].expand(1, 16, keys, 128) for name in ("key", "value")}
    check_same_bits(
        inputs | {"attn_mask": torch.ones(1, 1, 1, keys, dtype=torch.bool, device=device).expand(1, 16, 1, keys)}
    )


@ROWS
@pytest.mark.parametrize("tensor", WRT)
def test_overlapping_rows(tensor, rows, dtype, device):
    """A sliding window over one signal: each row begins one element after the last."""
    inputs = make(rows, dtype, device)
    shape = inputs[tensor].shape
    inputs[tensor] = torch.randn(sum(shape), dtype=dtype, device=device).as_strided(shape, (shape[1], 1, 1, 1))
    check_same_bits(inputs)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_a_pointer_that_is_not_aligned(offset, device):
    check_same_bits(
        make(64, device=device, batch=6, heads=(4, 4), keys=64, dim=64, value_dim=64, layout=f"offset-{offset}")
    )


def test_a_size_1_dimension_with_an_odd_stride(device):
    q = torch.tensor([[[[1.0, 2.0]]]], device=device).transpose(2, 3)
    one = torch.ones(1, 1, 1, 1, device=device)
    assert_same_bits(attention(q, one, one), torch.ones(1, 1, 2, 1, device=device))
    q = torch.tensor([[[[1.0, 2.0]]]], device=device)
    assert_same_bits(attention(q.transpose(0, 2).transpose(1, 2), q, q), q)


@ROWS
def test_heads_split_from_a_projection(rows, dtype, device):
    inputs = make(rows, dtype, device, value_dim=24)
    for name in WRT:
        batch, heads, length, dim = inputs[name].shape
        inputs[name] = (
            torch.randn(batch, length, heads * dim, dtype=dtype, device=device)
            .view(batch, length, heads, dim)
            .transpose(1, 2)
        )
    check_same_bits(inputs)


@ROWS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_output_is_contiguous_or_follows_the_query(layout, rows, dtype, device):
    inputs = make(rows, dtype, device, layout=layout)
    out, lse = call(**inputs)
    heads_in_rows = inputs["query"].stride(1) < inputs["query"].stride(2)
    assert (out.transpose(1, 2) if heads_in_rows else out).is_contiguous()
    assert lse.is_contiguous()


def test_small_tensors_of_any_stride(dtype, device):
    inputs = make(4, dtype, device, mask="float", alibi=True, sinks=True, kv_lens=(140, 20))
    strided = {name: torch.stack([inputs[name]] * 3, -1)[..., 1] for name in ("alibi_slopes", "sinks", "kv_lens")}
    check_same_bits(inputs | strided, [*WRT, "sinks"])
    assert_same_bits(attention(**inputs), attention(**inputs | {"kv_lens": inputs["kv_lens"].int()}))
    same = torch.full((4,), 0.5, dtype=dtype, device=device)
    assert_same_bits(attention(**inputs | {"sinks": same}), attention(**inputs | {"sinks": same[:1].expand(4)}))


def test_sinks_and_slopes_may_be_float32(dtype, device):
    inputs = make(4, dtype, device, alibi=True, sinks=True)
    wide = inputs | {name: inputs[name].float() for name in ("alibi_slopes", "sinks")}
    assert_same_bits(attention(**inputs), attention(**wide))
    grads = random_gradients(call, inputs)
    assert gradients(call, wide, grads, ["sinks"])[0].dtype == torch.float32


class TestEmpty:
    """Any size may be 0."""

    @pytest.mark.parametrize(
        "sizes",
        [
            {"batch": 0},
            {"heads": (0, 0)},
            {"heads": (0, 2)},
            {"rows": 0},
            {"keys": 0},
            {"dim": 0},
            {"value_dim": 0},
            {"dim": 0, "value_dim": 0},
            {"batch": 0, "heads": (0, 0), "rows": 0, "keys": 0, "dim": 0, "value_dim": 0},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("mask", [None, "bool-all", "float"])
    def test_shapes(self, sizes, mask, dtype, device):
        inputs = make(dtype=dtype, device=device, mask=mask, **{"rows": 5} | sizes)
        out, lse = call(**inputs)
        q, v = inputs["query"], inputs["value"]
        assert out.shape == (*q.shape[:3], v.shape[3]) and lse.shape == q.shape[:3]
        assert out.isfinite().all() and (lse.isfinite().all() if inputs["key"].shape[2] else (lse == -torch.inf).all())
        wrt = WRT + (["attn_mask"] if mask == "float" else [])
        for name, gradient in zip(wrt, gradients(call, inputs, random_gradients(call, inputs), wrt), strict=True):
            assert gradient.shape == inputs[name].shape and gradient.isfinite().all()
            if not q.numel() and q.shape[3]:
                assert not gradient.any()

    @ROWS
    def test_without_dimensions_every_score_is_0(self, rows, dtype, device):
        inputs = make(rows, dtype, device, dim=0)
        out, lse = call(**inputs)
        mean = inputs["value"].float().mean(2, keepdim=True).repeat_interleave(2, 1).expand(2, 4, rows, 40)
        assert_close(out, mean.to(dtype), rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
        assert_close(lse, torch.full_like(lse, 140.0).log())
