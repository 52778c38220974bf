"""Gradients against those of dense FP64 attention."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch.testing import assert_close

import reference
from cases import CASES, LAYOUTS, LONG, Case, case
from checks import assert_same_bits, check_backward, differentiable, gradients, random_gradients
from flashsoftmax import attention

WRT = ["query", "key", "value"]

SOME = pytest.mark.parametrize(
    "case",
    [case(x) for x in ("heads-6-2", "sinks-mask-lengths", "mask-float-hides", "all-features", "decode-lengths")],
    ids=lambda case: case.id,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_matches_dense_attention(case, dtype, device):
    check_backward(case.call(attention), partial(case.inputs, dtype, device))


def test_long_rows(device):
    case = Case("", heads=(1, 1), rows=LONG.rows // 8, keys=LONG.keys, dim=16, causal=True)
    check_backward(case.call(attention), partial(case.inputs, torch.float32, device))


@SOME
def test_inputs_are_not_written(case, dtype):
    call, inputs = case.call(attention), case.inputs(dtype)
    grads = random_gradients(call, inputs)
    tensors = [*grads, *(x for x in inputs.values() if isinstance(x, torch.Tensor))]
    before = [x.clone() for x in tensors]
    gradients(call, inputs, grads, differentiable(inputs))
    assert_same_bits(tensors, before)


@SOME
def test_of_lse_alone(case, dtype, device):
    """And the gradient of the values is 0: lse does not see them."""
    call, inputs = case.call(attention), case.inputs(dtype, device)
    check_backward(call, partial(case.inputs, dtype, device), of=("lse",))
    assert not gradients(call, inputs, random_gradients(call, inputs, ("lse",)), ["value"])[0].any()


@SOME
def test_of_out_alone(case, dtype, device):
    """Whether lse is returned or not."""
    call, inputs = case.call(attention), case.inputs(dtype, device)
    check_backward(call, partial(case.inputs, dtype, device), of=("out",))
    grads, wrt = random_gradients(call, inputs, ("out",)), differentiable(inputs)

    def without_lse(**inputs):
        return attention(**inputs, split_size=case.split_size), None

    assert_same_bits(gradients(without_lse, inputs, grads, wrt), gradients(call, inputs, grads, wrt))


def test_of_lse_in_closed_form():
    """lse.sum(): dQ = scale P K, dK = scale P' Q, dV = 0."""
    q, k, v = (torch.randn(1, 1, 20, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    attention(q, k, v, return_lse=True)[1].sum().backward()
    p = torch.softmax(q @ k.mT * 8**-0.5, -1)
    assert_close(q.grad, 8**-0.5 * p @ k)
    assert_close(k.grad, 8**-0.5 * p.mT @ q)
    assert_same_bits(v.grad, torch.zeros_like(v))


@pytest.mark.parametrize("wrt", ["query", "key", "value", "attn_mask", "sinks"])
def test_of_one_input_alone_has_the_same_bits(wrt):
    inputs, call = case("all-features").inputs(torch.float32), case("all-features").call(attention)
    grads, names = random_gradients(call, inputs), ["query", "key", "value", "attn_mask", "sinks"]
    together = dict(zip(names, gradients(call, inputs, grads, names), strict=True))
    assert_same_bits(gradients(call, inputs, grads, [wrt])[0], together[wrt])


def test_of_a_single_key_is_zero():
    """A softmax over one key is constant, whatever the scores are."""
    torch.manual_seed(352)
    q, k, v = (3 * torch.randn(1, 1, 1, 16, dtype=torch.float16)).expand(3, 1, 1, 1, 16).unbind()
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    attention(q, k, v).sum().backward()
    assert_close(q.grad, torch.zeros_like(q), rtol=0, atol=1e-4)
    assert_close(k.grad, torch.zeros_like(k), rtol=0, atol=1e-4)
    assert_close(v.grad, torch.ones_like(v), rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_a_padded_tail_does_not_overflow_when_lse_is_far_below_zero(causal):
    """exp(0 - lse) for a padding of score 0 would be inf."""
    q, k, v = (torch.randn(1, 1, 704, 64) for _ in range(3))
    q, k = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 1, -960
    inputs = {"query": q.bfloat16(), "key": k.bfloat16(), "value": v.bfloat16(), "causal": causal}
    call = Case("").call(attention)
    if not causal:
        lse = call(**inputs)[1]
        assert_close(lse, torch.full_like(lse, -113.44), rtol=0, atol=0.1)
    check_backward(call, inputs)


@pytest.mark.parametrize("q_offset", [-129, -128, -127, -65, -64, -63, -1, 0, 1, 2, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("window", [(0, 0), (1, 0), (0, 1), (64, 0), (None, 0), (0, None)], ids=str)
def test_bands_whose_corners_lie_at_the_edges_of_tiles(window, q_offset):
    """One key too few or too many shows in float64, whatever the tile."""
    inputs = Case("", heads=(1, 1), rows=130, keys=260, dim=4, window=window, q_offset=q_offset).inputs(torch.float64)
    call = Case("").call(attention)
    grads = random_gradients(call, inputs)
    assert_close(gradients(call, inputs, grads, WRT), gradients(reference.attention, inputs, grads, WRT))
    assert_close(call(**inputs), reference.attention(**inputs))


@pytest.mark.parametrize("rows", [3, 40], ids=["decode", "tiled"])
def test_padded_queries_give_nothing_to_a_large_sink(rows, dtype, device):
    """Their lse is -inf: in a sum, e^(sink - lse) would be infinite. Their upstream gradient may be NaN."""
    inputs = Case("", rows=rows, sinks=True, q_lens=(2,)).inputs(dtype, device) | {"sinks": torch.full((2,), 200.0)}
    inputs["sinks"] = inputs["sinks"].to(device)
    call = Case("").call(attention)
    grads = random_gradients(call, inputs)
    expected = gradients(call, inputs, grads, [*WRT, "sinks"])
    for x in grads:
        x[:, :, 2:] = torch.nan
    found = gradients(call, inputs, grads, [*WRT, "sinks"])
    assert all(x.isfinite().all() for x in found)
    assert_same_bits(found, expected)


class TestUpstreamGradient:
    """Of any strides, for which it costs nothing to be right."""

    inputs = Case("", batch=2, heads=(8, 1), rows=5, keys=20, dim=32, layout="heads-in-rows")

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_of_any_layout(self, layout, dtype):
        inputs, call = self.inputs.inputs(dtype), self.inputs.call(attention)
        grads = random_gradients(call, inputs)
        contiguous = gradients(call, inputs, (grads[0].contiguous(), grads[1].contiguous()), WRT)
        grads = (
            LAYOUTS[layout](grads[0].contiguous()),
            LAYOUTS[layout](grads[1].contiguous()[..., None])[..., 0],
        )
        assert_same_bits(gradients(call, inputs, grads, WRT), contiguous)

    def test_whose_strides_are_all_zero(self, dtype):
        inputs, call = Case("", heads=(5, 5), rows=2, keys=8, dim=8).inputs(dtype), Case("").call(attention)
        out, lse = call(**inputs)
        one = torch.ones((), dtype=dtype), torch.ones(())
        expanded = gradients(call, inputs, (one[0].expand_as(out), one[1].expand_as(lse)), WRT)
        dense = gradients(call, inputs, (torch.ones_like(out), torch.ones_like(lse)), WRT)
        assert_same_bits(expanded, dense)

    def test_that_is_a_slice_of_a_concatenation(self, dtype):
        inputs, call = self.inputs.inputs(dtype), self.inputs.call(attention)
        grads = random_gradients(call, inputs)
        whole = torch.cat([torch.full_like(grads[0], torch.nan), grads[0]], -1)
        sliced = gradients(call, inputs, (whole[..., grads[0].shape[-1] :], grads[1]), WRT)
        assert_same_bits(sliced, gradients(call, inputs, grads, WRT))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_have_the_layout_of_a_contiguous_tensor_or_of_their_input(layout):
    inputs = Case("", batch=2, heads=(4, 2), rows=6, keys=9, dim=8, layout=layout).inputs(torch.float32)
    call = Case("").call(attention)
    for name, gradient in zip(WRT, gradients(call, inputs, random_gradients(call, inputs), WRT), strict=True):
        heads_in_rows = inputs[name].stride(1) < inputs[name].stride(2)
        assert (gradient.transpose(1, 2) if heads_in_rows else gradient).is_contiguous(), name


@pytest.mark.parametrize(
    "shape",
    [(1, 1), (7, 1), (1, 9), (7, 9), (4, 1, 9), (1, 4, 7, 9), (2, 1, 1, 9), (2, 1, 7, 1), (2, 4, 7, 9)],
    ids=str,
)
def test_gradient_of_a_broadcast_mask_is_summed_over_what_it_was_broadcast_over(shape, device):
    case = Case("", batch=2, heads=(4, 2), rows=7, keys=9, dim=8)

    def inputs():
        return case.inputs(torch.float32, device) | {"attn_mask": torch.randn(shape, device=device)}

    check_backward(case.call(attention), inputs)


def broadcast_shapes(*sizes):
    return pytest.mark.parametrize("shape", list(product(*((1, n) for n in sizes))), ids=str)


class TestGradientOfABroadcastBias:
    """In every way to broadcast. Tiles of the bias begin at other keys than those of sequences with a kv_start."""

    ALL = Case(
        "",
        batch=2,
        heads=(4, 2),
        rows=70,
        keys=150,
        dim=16,
        causal=True,
        softcap=3.0,
        sinks=True,
        mask="bool",
        kv_starts=(3, 71),
        kv_lens=(150, 140),
        q_lens=(70, 30),
        dropout_p=0.3,
    )

    def check(self, case, shape, dtype, device):
        def inputs():
            return case.inputs(dtype, device) | {"attn_bias": torch.randn(shape, device=device).to(dtype)}

        check_backward(case.call(attention), inputs)

    @broadcast_shapes(2, 4, 70, 150)
    def test_with_all_features(self, shape, device):
        self.check(self.ALL, shape, torch.float32, device)

    @pytest.mark.parametrize("dim", [16, 100, 200])
    @pytest.mark.parametrize("shape", [(1, 1, 70, 150), (2, 1, 1, 150)], ids=str)
    def test_of_any_dtype_and_head_dim(self, shape, dim, dtype, device):
        self.check(replace(self.ALL, dim=dim, heads=(1, 1)), shape, dtype, device)

    @broadcast_shapes(6, 8, 20, 40)
    def test_of_many_heads(self, shape, device):
        """Several blocks of a GPU share the sum."""
        self.check(Case("", batch=6, heads=(8, 8), rows=20, keys=40, dim=8), shape, torch.float32, device)

    @pytest.mark.parametrize("shape", [(1, 1, 70, 150), (1, 4, 1, 150)], ids=str)
    def test_what_no_query_sees_changes_nothing(self, shape, device):
        """Keys and values before the start, and queries beyond the length, are NaN in all these cases."""
        bias = torch.randn(shape, device=device)
        inputs, call = self.ALL.inputs(torch.float32, device) | {"attn_bias": bias}, self.ALL.call(attention)
        grads = random_gradients(call, inputs)
        (found,) = gradients(call, inputs, grads, ["attn_bias"])
        clean = {name: inputs[name].nan_to_num() for name in WRT}
        assert_same_bits(found, gradients(call, inputs | clean, grads, ["attn_bias"])[0])
        assert found.isfinite().all() and found.any()


def test_no_gradient_is_computed_for_a_mask_that_asks_for_none():
    q, k, v = (torch.randn(1, 1, 6, 8, requires_grad=True) for _ in range(3))
    mask = torch.randn(6, 6)
    attention(q, k, v, mask).sum().backward()
    assert mask.grad is None


def test_through_a_leaf_that_is_expanded():
    """Multi-query attention made by expanding one head: the gradient of the head is the sum."""
    q = torch.randn(1, 4, 6, 8, dtype=torch.float64)
    k, v = (torch.randn(1, 1, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    attention(q, k.expand(1, 4, 9, 8), v.expand(1, 4, 9, 8)).sum().backward()
    expanded = k.grad, v.grad
    k.grad = v.grad = None
    attention(q, k, v).sum().backward()
    assert_close(expanded, (k.grad, v.grad))
