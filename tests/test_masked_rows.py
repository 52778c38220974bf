"""Rows that see no key, keys that no row sees, and NaN: what must not spread, what must not be swallowed."""

import pytest
import torch
from torch import inf, nan
from torch.testing import assert_close

import reference
from cases import Case
from checks import assert_same_bits, cast, check_backward, differentiable, gradients, random_gradients
from flashsoftmax import attention

ROWS = pytest.mark.parametrize("rows", [2, 40], ids=["decode", "tiled"])
KEYS = 600
WRT = ["query", "key", "value"]
call = Case("", split_size=256).call(attention)


def make(rows, dtype=torch.float32, keys=KEYS, heads=(2, 1), batch=2, dim=16):
    return Case("", batch=batch, heads=heads, rows=rows, keys=keys, dim=dim).inputs(dtype)


def last_row_sees_nothing(rows):
    return (torch.arange(rows) < rows - 1)[:, None].expand(rows, KEYS)


# Options under which the last row sees no key. All but the masks hide every key from every row.
HIDING = {
    "bool-mask": lambda rows: {"attn_mask": last_row_sees_nothing(rows)},
    "float-mask": lambda rows: {"attn_mask": torch.zeros(rows, KEYS).masked_fill(~last_row_sees_nothing(rows), -inf)},
    "softcap-mask": lambda rows: {"attn_mask": last_row_sees_nothing(rows), "softcap": 5.0},
    "alibi-mask": lambda rows: {"attn_mask": last_row_sees_nothing(rows), "alibi_slopes": torch.ones(2)},
    "kv-lens": lambda rows: {"kv_lens": torch.tensor([0, 0])},
    "kv-lens-causal": lambda rows: {"kv_lens": torch.tensor([0, 0]), "causal": True},
    "causal": lambda rows: {"causal": True, "q_offset": -rows},
    "window": lambda rows: {"window": (3, 3), "q_offset": KEYS + 3},
    "window-and-mask": lambda rows: {
        "window": (5, 0),
        "attn_mask": torch.arange(KEYS)[None] < KEYS - rows - 5,
    },
    "kv-lens-and-mask": lambda rows: {
        "kv_lens": torch.tensor([9, 9]),
        "attn_mask": torch.arange(KEYS)[None] >= 9,
    },
}


@ROWS
@pytest.mark.parametrize("hide", HIDING)
def test_output_is_0_lse_minus_inf_gradients_0(hide, rows, dtype, device):
    inputs = make(rows, dtype) | HIDING[hide](rows)
    inputs = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    if "attn_mask" in inputs and inputs["attn_mask"].is_floating_point():
        inputs["attn_mask"] = inputs["attn_mask"].to(dtype)
    out, lse = call(**inputs)
    assert not out[:, :, -1].any() and (lse[:, :, -1] == -inf).all()
    found = gradients(call, inputs, random_gradients(call, inputs), differentiable(inputs))
    assert all(gradient.isfinite().all() for gradient in found) and not found[0][:, :, -1].any()
    if lse.isinf().all():
        assert not any(gradient.any() for gradient in found)


@ROWS
@pytest.mark.parametrize("hide", HIDING)
def test_with_a_sink_lse_is_the_sink(hide, rows, dtype):
    inputs = cast(make(rows) | HIDING[hide](rows) | {"sinks": torch.tensor([1.5, -300])}, dtype)
    out, lse = call(**inputs)
    assert not out[:, :, -1].any()
    assert_same_bits(lse[:, :, -1], inputs["sinks"].float().expand(2, 2))
    check_backward(call, inputs, slack=4)


def test_the_upper_left_of_a_mask():
    torch.manual_seed(13)
    q, k, v = (torch.rand(1, 1, 8, 8, requires_grad=True) for _ in range(3))
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:4, :4] = True
    out = attention(q, k, v, mask)
    out.sum().backward()
    assert not out[:, :, 4:].any()
    for x in (q, k, v):
        assert x.grad.isfinite().all() and not x.grad[:, :, 4:].any()


def test_an_empty_row_of_one_sequence_in_a_batch():
    allowed = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    mask = torch.stack([allowed, allowed & torch.tensor([True, True, False, False])])[:, None]
    inputs = Case("", batch=2, heads=(1, 1), rows=4, keys=4, dim=1).inputs(torch.float32) | {"attn_mask": mask}
    grad = torch.ones(2, 1, 4, 1)
    grad[1, 0, 3] = 0
    found = gradients(call, inputs, (grad, None), WRT)
    assert_close(found, gradients(reference.attention, inputs, (grad, None), WRT))


@ROWS
def test_no_keys_at_all(rows, dtype):
    inputs = make(rows, dtype, keys=0)
    out, lse = call(**inputs)
    assert not out.any() and (lse == -inf).all()
    for name, gradient in zip(WRT, gradients(call, inputs, random_gradients(call, inputs), WRT), strict=True):
        assert gradient.shape == inputs[name].shape and not gradient.any()
    sinks = torch.randn(2, dtype=dtype)
    out, lse = call(**inputs, sinks=sinks)
    assert not out.any()
    assert_same_bits(lse, sinks.float()[:, None].expand(2, 2, rows))


@ROWS
@pytest.mark.parametrize("hide", HIDING)
def test_what_an_empty_row_holds_changes_nothing(hide, rows, dtype):
    """Neither its query nor its upstream gradient."""
    inputs = make(rows, dtype) | HIDING[hide](rows)
    grads = random_gradients(call, inputs)
    expected = [*call(**inputs), *gradients(call, inputs, grads, WRT)]
    inputs["query"][:, :, -1] = grads[0][:, :, -1] = grads[1][:, :, -1] = nan
    assert_same_bits([*call(**inputs), *gradients(call, inputs, grads, WRT)], expected)


def test_leading_tiles_hidden_from_a_row():
    ones = torch.ones(1, 1, 640, 4)
    distance = torch.arange(640)[:, None] - torch.arange(640)
    for options in ({"attn_mask": (distance >= 0) & (distance <= 9)}, {"window": (9, 0)}):
        out, lse = attention(ones, ones, ones, return_lse=True, **options)
        assert_close(out, ones)
        assert_close(lse[0, 0, 9:], torch.full((631,), 2 + torch.log(torch.tensor(10.0)).item()))


# Ways to hide key 70 from every row (or, for the window, from all but a few), by selection.
def without_key_70(rows):
    return (torch.arange(KEYS) != 70)[None].expand(rows, KEYS)


HIDDEN = {
    "bool-mask": lambda rows: {"attn_mask": without_key_70(rows)},
    "bool-mask-softcap-alibi": lambda rows: {
        "attn_mask": without_key_70(rows),
        "softcap": 3.0,
        "alibi_slopes": torch.ones(2),
    },
    "causal": lambda rows: {"causal": True, "q_offset": 69 - rows},
    "window-left": lambda rows: {"window": (30, None), "q_offset": 101},
    "window-right": lambda rows: {"window": (None, 1), "q_offset": 68 - rows},
    "kv-lens": lambda rows: {"kv_lens": torch.tensor([70, 69])},
}


@ROWS
@pytest.mark.parametrize("what", [nan, inf])
@pytest.mark.parametrize("hide", HIDDEN)
def test_a_hidden_key_may_be_anything(hide, what, rows, dtype):
    inputs = make(rows, dtype) | HIDDEN[hide](rows)
    changed = inputs | {"key": inputs["key"].clone()}
    changed["key"][:, :, 70, 3] = what
    assert_same_bits(call(**inputs), call(**changed))
    grads = random_gradients(call, inputs)
    assert_same_bits(gradients(call, inputs, grads, WRT), gradients(call, changed, grads, WRT))


@ROWS
@pytest.mark.parametrize("tensors", [("key",), ("value",), ("key", "value")], ids="-".join)
def test_keys_and_values_beyond_kv_lens_are_not_read(tensors, rows, dtype):
    lengths = torch.tensor([65, 3])
    inputs = make(rows, dtype) | {"kv_lens": lengths}
    changed = inputs | {name: inputs[name].clone() for name in tensors}
    for name in tensors:
        for sequence, length in zip(changed[name], lengths, strict=True):
            sequence[:, length:] = nan
    assert_same_bits(call(**inputs), call(**changed))
    grads = random_gradients(call, inputs)
    found = gradients(call, changed, grads, WRT)
    assert_same_bits(gradients(call, inputs, grads, WRT), found)
    for gradient in found[1:]:
        assert all(not sequence[:, length:].any() for sequence, length in zip(gradient, lengths, strict=True))


def test_a_hidden_nan_in_the_first_key_of_a_tiny_problem():
    q = k = v = torch.arange(8.0).view(1, 1, 2, 4)
    k = k.clone()
    k[..., 1, 0] = nan
    out = attention(q, k, v, torch.tensor([[True, False], [True, False]]))
    assert_same_bits(out, v[:, :, :1].expand(1, 1, 2, 4))


@ROWS
class TestVisibleNaN:
    """A NaN makes the rows that see it NaN, and no others."""

    def test_in_every_query(self, rows, dtype):
        inputs = make(rows, dtype)
        out, lse = call(**inputs | {"query": torch.full_like(inputs["query"], nan)})
        assert out.isnan().all() and lse.isnan().all()

    def test_in_one_query(self, rows, dtype):
        inputs = make(rows, dtype)
        out, lse = call(**inputs)
        inputs["query"][:, :, 1, 5] = nan
        self.check(call(**inputs), (out, lse), torch.arange(rows) == 1)

    @pytest.mark.parametrize("at", [0, 127, 128, 598])
    def test_in_one_key(self, at, rows, dtype):
        """Causal, so aligned that rows 1 and later see it."""
        inputs = make(rows, dtype) | {"causal": True, "q_offset": at - 1}
        out, lse = call(**inputs)
        inputs["key"][:, :, at, 0] = nan
        self.check(call(**inputs), (out, lse), torch.arange(rows) >= 1)

    @pytest.mark.parametrize("at", [0, 127, 128, 598])
    def test_in_one_key_backward(self, at, rows, dtype):
        """The gradients of the rows that do not see it are as they were; the others' are NaN."""
        inputs = make(rows, dtype) | {"causal": True, "q_offset": at - 1}
        grads = random_gradients(call, inputs)
        before = gradients(call, inputs, grads, ["query"])[0]
        inputs["key"][:, :, at, 0] = nan
        after = gradients(call, inputs, grads, ["query"])[0]
        assert_same_bits(after[:, :, :1], before[:, :, :1])
        assert after[:, :, 1:].isnan().any(-1).all()

    def test_in_one_query_backward(self, rows, dtype):
        """The gradients of the keys that it does not see are as they were."""
        inputs = make(rows, dtype) | {"causal": True, "q_offset": KEYS // 2 - rows}
        grads = random_gradients(call, inputs)
        before = gradients(call, inputs, grads, ["key", "value"])
        inputs["query"][:, :, 0, 5] = nan
        seen = KEYS // 2 - rows + 1
        for a, b in zip(gradients(call, inputs, grads, ["key", "value"]), before, strict=True):
            assert a[:, :, :seen].isnan().any(-1).all()
            assert_same_bits(a[:, :, seen:], b[:, :, seen:])

    def test_in_the_float_mask(self, rows, dtype):
        inputs = make(rows, dtype) | {"attn_mask": torch.zeros(rows, KEYS, dtype=dtype)}
        out, lse = call(**inputs)
        inputs["attn_mask"][1, 77] = nan
        self.check(call(**inputs), (out, lse), torch.arange(rows) == 1)

    def test_in_a_sink(self, rows, dtype):
        out, lse = call(**make(rows, dtype), sinks=torch.tensor([0.0, nan], dtype=dtype))
        assert out[:, 1].isnan().all() and lse[:, 1].isnan().all()
        assert out[:, 0].isfinite().all() and lse[:, 0].isfinite().all()

    def test_in_a_value(self, rows, dtype):
        inputs = make(rows, dtype)
        out, lse = call(**inputs)
        inputs["value"][:, :, 77, 3] = nan
        found, found_lse = call(**inputs)
        assert found[..., 3].isnan().all()
        found[..., 3] = out[..., 3]
        assert_same_bits((found, found_lse), (out, lse))

    @staticmethod
    def check(found, before, touched):
        for a, b in zip(found, before, strict=True):
            assert a[:, :, touched].isnan().all()
            assert_same_bits(a[:, :, ~touched], b[:, :, ~touched])


@pytest.mark.parametrize("rows", [1, 40], ids=["decode", "tiled"])
def test_a_float64_mask_beside_float32(rows, device):
    """Its finite values stay finite where float32 cannot hold them: -inf alone hides a key."""
    q, k, v = torch.randn(1, 2, rows, 8), torch.randn(1, 2, 70, 8), torch.randn(1, 2, 70, 8)
    mask = torch.zeros(rows, 70, dtype=torch.float64)
    lowest, inf = torch.finfo(torch.float64).min, torch.inf
    mask[:, ::2], mask[:, 1], mask[0] = lowest, -inf, lowest
    found = attention(*(x.to(device) for x in (q, k, v)), mask.to(device), return_lse=True)
    narrow = mask.clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max).masked_fill(mask == -inf, -inf)
    assert_same_bits(found, attention(*(x.to(device) for x in (q, k, v)), narrow.float().to(device), return_lse=True))
    assert not found[1].isinf().any() and found[0][0, 0, 0].abs().sum() > 0
    above = torch.zeros(rows, 70, dtype=torch.float64, device=device)
    above[:, 7] = 1e39
    out = attention(*(x.to(device) for x in (q, k, v)), above)
    assert_same_bits(out, v[:, :, 7:8].to(device).expand_as(out))
