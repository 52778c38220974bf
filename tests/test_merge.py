"""merge joins attention over disjoint keys from (out, lse) alone."""

import pytest
import torch
from torch import inf, nan
from torch.testing import assert_close

from checks import assert_accurate, assert_same_bits
from flashsoftmax import merge

OPERATOR = "merge"


def dense(outs, lses):
    """The definition, in the dtype of its arguments. Empty states are left out by selection."""
    outs, lses = torch.stack(list(outs)), torch.stack(list(lses))
    empty = lses.isinf()
    lses = lses.masked_fill(empty, -inf)
    lse = torch.logsumexp(lses.masked_fill(empty.all(0), 0), 0)
    weights = torch.exp(lses - lse).masked_fill(empty, 0).to(outs.dtype)
    out = (weights[..., None] * outs.masked_fill(empty[..., None], 0)).sum(0)
    return out, lse.masked_fill(empty.all(0), -inf)


def states(count, shape=(2, 3, 20, 24), dtype=torch.float32, device="cpu", spread=3.0, empty=0.2):
    """Some of them empty, with NaN for output; some rows empty in all of them."""
    outs = [torch.randn(shape).to(device, dtype) for _ in range(count)]
    lses = [
        (spread * torch.randn(shape[:3])).to(device, torch.promote_types(dtype, torch.float32)) for _ in range(count)
    ]
    for out, lse in zip(outs, lses, strict=True):
        hidden = torch.rand(shape[:3], device=device) < empty
        if shape[2] > 1:
            hidden[:, :, -1] = True
        lse[hidden] = -inf
        out[hidden] = nan
    return outs, lses


@pytest.mark.parametrize("count", [1, 2, 3, 8, 33])
def test_forward(count, dtype, device):
    outs, lses = states(count, dtype=dtype, device=device)
    out, lse = merge(outs, lses)
    wide = dense([x.double() for x in outs], [x.double() for x in lses])
    naive = dense(outs, lses)
    assert (out.dtype, lse.dtype) == (outs[0].dtype, lses[0].dtype)
    assert_accurate("out", out, wide[0], naive[0])
    assert_accurate("lse", lse, wide[1], naive[1])


def backward(function, outs, lses, grads):
    leaves = [x.detach().clone().requires_grad_() for x in (*outs, *lses)]
    return torch.autograd.grad(function(leaves[: len(outs)], leaves[len(outs) :]), leaves, grads)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_backward(count, dtype, device):
    outs, lses = states(count, dtype=dtype, device=device)
    grads = torch.randn_like(outs[0]), torch.randn_like(lses[0])
    found = backward(merge, outs, lses, grads)
    exact = backward(dense, [x.double() for x in outs], [x.double() for x in lses], [g.double() for g in grads])
    naive = backward(dense, outs, lses, grads)
    for i, (actual, wanted, other) in enumerate(zip(found, exact, naive, strict=True)):
        assert_accurate(f"gradient {i}", actual, wanted, other)


@pytest.mark.parametrize("which", [0, 1], ids=["out", "lse"])
def test_gradient_of_one_result_alone(which):
    outs, lses = states(3, dtype=torch.float64)
    grad = [torch.randn_like(outs[0]), torch.randn_like(lses[0])][which]
    found = backward(lambda *states: merge(*states)[which], outs, lses, grad)
    leaves = [x.clone().requires_grad_() for x in (*outs, *lses)]
    exact = torch.autograd.grad(
        dense(leaves[:3], leaves[3:])[which], leaves, grad, allow_unused=True, materialize_grads=True
    )
    assert_close(found, exact)


def test_known_weights():
    def of(*lses):
        out, lse = merge(
            [torch.full((1, 1, 1, 1), float(i == 0)) for i in range(len(lses))],
            [torch.full((1, 1, 1), x) for x in lses],
        )
        return out.item(), lse.item()

    assert of(0.0, 100.0) == (pytest.approx(3.8e-44, abs=1e-43), 100)
    assert of(800.0, 800.0) == (0.5, pytest.approx(800.693, abs=1e-3))
    assert of(0.0, 1.0) == (pytest.approx(0.2689, abs=1e-4), pytest.approx(1.3133, abs=1e-4))
    assert of(-5e4, -5e4) == (0.5, pytest.approx(0.693 - 5e4, abs=1e-2))
    assert of(-1e30, -1e30)[0] == 0.5


def test_one_state_is_itself(dtype):
    outs, lses = states(1, dtype=dtype, empty=0)
    outs[0][:, :, -1] = 0
    assert_same_bits(merge(outs, lses), (outs[0], lses[0]))


@pytest.mark.parametrize("empty", [-inf, inf])
@pytest.mark.parametrize("filling", [0.0, nan])
class TestEmptyStates:
    """lse = -inf, or +inf as some libraries write it; their outputs are not read."""

    def test_of_empty_states_alone(self, filling, empty, dtype):
        outs, lses = [torch.full((1, 2, 3, 8), filling, dtype=dtype)] * 2, [torch.full((1, 2, 3), empty)] * 2
        out, lse = merge(outs, lses)
        assert not out.any() and (lse == -inf).all()
        for gradient in backward(merge, outs, lses, (torch.randn_like(out), torch.randn_like(lse))):
            assert not gradient.any()

    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_change_nothing(self, at, filling, empty, dtype):
        outs, lses = states(2, dtype=dtype, empty=0)
        outs, lses = [x[:, :, :-1] for x in outs], [x[:, :, :-1] for x in lses]
        expected = merge(outs, lses)
        grads = torch.randn_like(expected[0]), torch.randn_like(expected[1])
        gradients = backward(merge, outs, lses, grads)
        outs.insert(at, torch.full_like(outs[0], filling))
        lses.insert(at, torch.full_like(lses[0], empty))
        assert_same_bits(merge(outs, lses), expected)
        found = list(backward(merge, outs, lses, grads))
        assert not found.pop(at).any() and not found.pop(2 + at).any()
        assert_same_bits(found, list(gradients))


def test_nan_is_not_swallowed(dtype):
    outs, lses = states(2, dtype=dtype, empty=0)
    before = merge(outs, lses)
    lses[1][0, 0, 3] = nan
    outs[0][1, 1, 5, 7] = nan
    out, lse = merge(outs, lses)
    assert out[0, 0, 3].isnan().all() and lse[0, 0, 3].isnan()
    assert out[1, 1, 5, 7].isnan() and out.isnan().sum() == 24 + 1 and lse.isnan().sum() == 1
    assert_same_bits(out[~out.isnan()], before[0][~out.isnan()])


def test_lists_tuples_and_leading_axes_are_one(dtype, device):
    outs, lses = states(3, dtype=dtype, device=device)
    expected = merge(outs, lses)
    assert_same_bits(merge(tuple(outs), tuple(lses)), expected)
    assert_same_bits(merge(torch.stack(outs), torch.stack(lses)), expected)
    assert_same_bits(merge(torch.stack(outs), lses), expected)


def test_gradient_of_a_leading_axis():
    outs, lses = (torch.stack(x) for x in states(3, dtype=torch.float64))
    grads = torch.randn_like(outs[0]), torch.randn_like(lses[0])
    leaves = [outs.requires_grad_(), lses.requires_grad_()]
    assert_close(torch.autograd.grad(merge(*leaves), leaves, grads), torch.autograd.grad(dense(*leaves), leaves, grads))


def test_varlen(dtype, device):
    """[tokens, heads, dim] with lse [heads, tokens]."""
    outs, lses = states(3, (1, 4, 30, 16), dtype, device)
    out, lse = merge(outs, lses)
    assert_same_bits(
        merge([x[0].transpose(0, 1) for x in outs], [x[0] for x in lses]), (out[0].transpose(0, 1), lse[0])
    )
    stacked = torch.stack([x[0].transpose(0, 1) for x in outs]), torch.stack([x[0] for x in lses])
    assert_same_bits(merge(*stacked), (out[0].transpose(0, 1), lse[0]))


@pytest.mark.parametrize("heads", [1, 65, 96, 200])
def test_strides(heads, dtype, device):
    """Each state may be stored in its own way."""
    outs, lses = states(4, (2, heads, 5, 16), dtype, device)
    expected = merge(outs, lses)
    outs[1] = outs[1].transpose(1, 2).contiguous().transpose(1, 2)
    outs[2] = outs[2].mT.contiguous().mT
    outs[3] = torch.stack([torch.full_like(outs[3], nan), outs[3]], -1)[..., 1]
    lses[0] = lses[0].permute(2, 1, 0).contiguous().permute(2, 1, 0)
    lses[1] = lses[1].transpose(1, 2).contiguous().transpose(1, 2)
    lses[2] = torch.stack([lses[2], torch.full_like(lses[2], nan)], -1)[..., 0]
    assert_same_bits(merge(outs, lses), expected)
    grads = torch.randn_like(expected[0]), torch.randn_like(expected[1])
    contiguous = backward(merge, [x.contiguous() for x in outs], [x.contiguous() for x in lses], grads)
    leaves = [x.detach().requires_grad_() for x in (*outs, *lses)]
    assert_same_bits(torch.autograd.grad(merge(leaves[:4], leaves[4:]), leaves, grads), contiguous)


def test_broadcast(dtype, device):
    outs, lses = states(2, dtype=dtype, device=device, empty=0)
    outs[0], lses[1] = outs[0][:, :1, :1].expand_as(outs[0]), lses[1][:, :, :1].expand_as(lses[1])
    assert_same_bits(merge(outs, lses), merge([x.contiguous() for x in outs], [x.contiguous() for x in lses]))


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8), (2, 2, 3, 0)], ids=str)
def test_empty_tensors(shape, dtype, device):
    outs, lses = states(2, shape, dtype, device)
    out, lse = merge(outs, lses)
    assert out.shape == shape and lse.shape == shape[:3]
    for x, gradient in zip((*outs, *lses), backward(merge, outs, lses, (out, lse)), strict=True):
        assert gradient.shape == x.shape


def test_any_order_and_any_tree():
    outs, lses = states(6, dtype=torch.float64)
    whole = merge(outs, lses)
    assert_close(merge(outs[::-1], lses[::-1]), whole)
    pairs = [merge(outs[i : i + 2], lses[i : i + 2]) for i in (0, 2, 4)]
    assert_close(merge(*zip(*pairs, strict=True)), whole)


def test_inputs_are_not_written():
    outs, lses = states(3)
    before = [x.clone() for x in (*outs, *lses)]
    merge(outs, lses)
    assert_same_bits([*outs, *lses], before)


def test_gradcheck():
    outs, lses = states(3, (1, 2, 4, 3), torch.float64, empty=0)
    outs, lses = [x[:, :, :-1] for x in outs], [x[:, :, :-1] for x in lses]
    leaves = [x.clone().requires_grad_() for x in (*outs, *lses)]
    assert torch.autograd.gradcheck(lambda *x: merge(x[:3], x[3:]), leaves)


@pytest.mark.parametrize("count", [3, 40])
def test_large_outputs(count, device):
    """Their mean does not overflow."""
    for dtype in (torch.float32, torch.bfloat16):
        outs = torch.full((count, 1, 2, 5, 24), 3.38e38, dtype=dtype, device=device)
        out, _ = merge(outs, torch.zeros(count, 1, 2, 5, device=device))
        assert_close(out, outs[0], rtol=3e-6 if dtype == torch.float32 else 0, atol=0)
