"""Output and log-sum-exp against dense FP64 attention, and answers known without computing them."""

import math
import warnings
from functools import partial

import pytest
import torch
from torch.testing import assert_close

import reference
from cases import CASES, LONG, Case, case
from checks import assert_same_bits, cast, check_forward
from flashsoftmax import attention


@pytest.mark.parametrize("case", [*CASES, LONG], ids=lambda case: case.id)
def test_matches_dense_attention(case, dtype, device):
    if case is LONG and dtype != torch.float32:
        pytest.skip("the long one runs once")
    check_forward(case.call(attention), partial(case.inputs, dtype, device))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_float64_is_exact_to_its_last_digits(case):
    inputs = case.inputs(torch.float64)
    out, lse = case.call(attention)(**inputs)
    exact_out, exact_lse = reference.attention(**inputs)
    assert lse.dtype == torch.float64
    assert_close(out, exact_out, rtol=1e-12, atol=1e-12)
    assert_close(lse, exact_lse, rtol=1e-12, atol=1e-12)


def test_lse_comes_only_when_asked_for_and_changes_nothing():
    inputs = case("heads-6-2").inputs(torch.float32)
    out = attention(**inputs)
    assert_same_bits(out, attention(**inputs, return_lse=True)[0])


def test_attn_mask_may_be_positional_and_options_have_defaults():
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    mask = torch.rand(5, 5) < 0.5
    assert_same_bits(attention(q, k, v, mask), attention(query=q, key=k, value=v, attn_mask=mask))
    assert_same_bits(attention(q, k, v), attention(q, k, v, scale=8**-0.5, causal=False, window=None, q_offset=0))


def test_softcap_0_is_off():
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    assert_same_bits(attention(q, k, v, softcap=0.0), attention(q, k, v))


def test_inputs_are_not_written(dtype):
    inputs = case("all-features").inputs(dtype)
    before = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    attention(**inputs)
    for name, x in before.items():
        assert_close(inputs[name], x, rtol=0, atol=0, equal_nan=True)


class TestVisibleKeys:
    """The output tells which keys were seen: the scores are equal, and value j is the unit vector j."""

    def seen(self, rows, keys, **options):
        value = torch.eye(keys)[None, None]
        out = attention(torch.zeros(1, 1, rows, 4), torch.zeros(1, 1, keys, 4), value, **options)
        return [[j for j in range(keys) if row[j] > 0] for row in out[0, 0]]

    def test_causal_is_aligned_bottom_right(self):
        assert self.seen(1, 16, causal=True) == [list(range(16))]
        assert self.seen(2, 4, causal=True) == [[0, 1, 2], [0, 1, 2, 3]]
        assert self.seen(3, 2, causal=True) == [[], [0], [0, 1]]

    def test_q_offset_moves_the_band(self):
        assert self.seen(1, 16, causal=True, q_offset=0) == [[0]]
        assert self.seen(2, 4, causal=True, q_offset=-1) == [[], [0]]
        assert self.seen(2, 4, window=(1, 1), q_offset=1) == [[0, 1, 2], [1, 2, 3]]

    def test_window_counts_the_key_itself(self):
        assert self.seen(4, 4, window=(2, 0)) == [[0], [0, 1], [0, 1, 2], [1, 2, 3]]
        assert self.seen(3, 3, window=(0, 0)) == [[0], [1], [2]]

    def test_window_0_is_a_bound_and_none_is_not(self):
        assert self.seen(2, 4, window=(0, None)) == [[2, 3], [3]]
        assert self.seen(2, 4, window=(None, 0)) == [[0, 1, 2], [0, 1, 2, 3]]
        assert self.seen(2, 4, window=(None, None)) == [[0, 1, 2, 3]] * 2

    def test_causal_lowers_the_windows_right_bound(self):
        assert self.seen(3, 3, window=(1, 5), causal=True) == [[0], [0, 1], [1, 2]]

    def test_kv_lens_cuts_and_aligns(self):
        assert self.seen(2, 6, kv_lens=torch.tensor([3])) == [[0, 1, 2]] * 2
        assert self.seen(2, 6, kv_lens=torch.tensor([3]), causal=True) == [[0, 1], [0, 1, 2]]

    def test_q_lens_move_the_band(self):
        lens = torch.tensor([2])
        assert self.seen(4, 4, kv_lens=lens, q_lens=lens, causal=True) == [[0], [0, 1], [], []]

    def test_kv_starts_move_nothing(self):
        starts = torch.tensor([1])
        assert self.seen(2, 4, kv_starts=starts) == [[1, 2, 3]] * 2
        assert self.seen(2, 4, kv_starts=starts, window=(2, 0)) == [[1, 2], [1, 2, 3]]

    def test_true_in_the_mask_means_attend(self):
        mask = torch.tensor([[True, False, True], [False, True, False]])
        assert self.seen(2, 3, attn_mask=mask) == [[0, 2], [1]]


class TestAlignmentWarning:
    """A band over fewer keys than queries aligns the last query with the last key: seldom what is meant."""

    q, k = torch.randn(2, 1, 5, 4), torch.randn(2, 1, 8, 4)
    lens = torch.tensor([8, 3])

    def warnings(self, rows=5, **options):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            attention(self.q[:, :, :rows], self.k, self.k, **{"kv_lens": self.lens, "causal": True} | options)
        return found

    def test_names_both_remedies_and_the_caller(self):
        (found,) = self.warnings()
        assert "q_lens" in str(found.message) and "q_offset=0" in str(found.message)
        assert found.filename == __file__
        assert self.warnings(causal=False, window=(None, 0))

    @pytest.mark.parametrize(
        "options",
        [
            {"q_offset": 0},
            {"q_lens": torch.tensor([5, 3])},
            {"kv_lens": torch.tensor([8, 5])},
            {"kv_lens": torch.tensor([8, 0])},
            {"kv_lens": None},
            {"causal": False},
            {"rows": 1},
        ],
        ids=str,
    )
    def test_is_not_given(self, options):
        assert not self.warnings(**options)


def test_a_query_head_reads_the_key_head_of_its_group():
    value = torch.arange(2.0).view(1, 2, 1, 1).expand(1, 2, 7, 3)
    out = attention(torch.randn(1, 4, 5, 8), torch.randn(1, 2, 7, 8), value)
    assert_close(out[0, :, :, 0], torch.tensor([0.0, 0.0, 1.0, 1.0])[:, None].expand(4, 5))


def test_softcap_comes_before_the_mask():
    """Masked first, a score of -inf would be capped to -softcap and get weight."""
    q, k, v = torch.randn(3, 1, 1, 4, 8).unbind()
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    for attn_mask in (mask, torch.zeros(4, 4).masked_fill(~mask, -torch.inf)):
        assert_same_bits(attention(q, k, v, attn_mask, softcap=1.0)[0, 0, 0], v[0, 0, 0])


def test_sink_takes_weight_and_gives_nothing():
    out, lse = attention(
        torch.zeros(1, 1, 1, 4),
        torch.zeros(1, 1, 3, 4),
        torch.ones(1, 1, 3, 4),
        sinks=torch.zeros(1),
        return_lse=True,
    )
    assert_close(out, torch.full_like(out, 0.75))
    assert_close(lse, torch.full_like(lse, math.log(4)))


class TestRange:
    """Where a softmax that subtracts no maximum, or the wrong one, overflows or underflows."""

    def test_huge_scores(self):
        x = torch.full((1, 1, 1, 64), 133120, dtype=torch.bfloat16)
        out, lse = attention(x, x, x, return_lse=True)
        assert_same_bits(out, x)
        assert_close(lse.item(), 1.41767e11, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("rows", [1, 40])
    def test_all_scores_far_below_zero(self, rows):
        q, k = torch.ones(1, 1, rows, 128), torch.full((1, 1, 64, 128), -512.0)
        k[:, :, 0] = -480
        v = torch.randn(1, 1, 64, 128)
        out, lse = attention(*(x.bfloat16() for x in (q, k, v)), return_lse=True)
        assert_same_bits(out, v[:, :, :1].bfloat16().expand_as(out))
        assert_close(lse, torch.full_like(lse, -5430.58), rtol=1e-5, atol=0)

    @pytest.mark.parametrize("rows", [1, 40])
    def test_one_key_of_score_minus_524288(self, rows):
        q, k, v = torch.ones(1, 1, rows, 128), torch.full((1, 1, 1, 128), -4096.0), torch.randn(1, 1, 1, 128)
        out, lse = attention(*(x.bfloat16() for x in (q, k, v)), return_lse=True)
        assert_same_bits(out, v.bfloat16().expand_as(out))
        assert_close(lse, torch.full_like(lse, -46340.95), rtol=1e-6, atol=0)

    def test_the_maximum_is_that_of_the_visible_keys(self, dtype):
        q = torch.tensor([-20000.0, 0.0]).view(1, 1, 2, 1).to(dtype)
        k = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1).to(dtype)
        v = torch.tensor([1.0, 100.0]).view(1, 1, 2, 1).to(dtype)
        out = attention(q, k, v, torch.tensor([True, False]).view(1, 2), scale=1.0)
        assert_same_bits(out[0, 0, :, 0], torch.ones(2, dtype=dtype))

    def test_causal_rows_with_every_score_at_minus_300(self):
        """Row 2 sees keys 0 to 362."""
        q, k, v = torch.zeros(1, 1, 88, 16), torch.zeros(1, 1, 448, 16), torch.randn(1, 1, 448, 16)
        q[..., 0], k[..., 0] = 1, -1200
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        assert_close(out[0, 0, 2], v[0, 0, :363].mean(0))
        assert_close(lse[0, 0, 2].item(), math.log(363) - 300, rtol=1e-7, atol=0)

    @pytest.mark.parametrize("rows", [4, 40])
    def test_a_bias_of_the_lowest_float_stays_finite(self, rows):
        lowest = torch.finfo(torch.float32).min
        q, k, v = torch.randn(1, 1, rows, 8), torch.randn(1, 1, 70, 8), torch.randn(1, 1, 70, 8)
        out, lse = attention(q, k, v, torch.full((rows, 70), lowest), return_lse=True)
        assert_close(out, v.mean(2, keepdim=True).expand_as(out))
        assert_same_bits(lse, torch.full_like(lse, lowest))
        mask = torch.where(torch.rand(rows, 70) < 0.5, lowest, 0.0)
        mask[:, 3] = 0
        assert_close(attention(q, k, v, mask), attention(q, k, v, mask == 0))

    @pytest.mark.parametrize("rows", [3, 40], ids=["decode", "tiled"])
    @pytest.mark.parametrize("scale", [1e-50, 0.0, -0.3, 1e35])
    def test_scales_that_no_exponential_can_take(self, scale, rows, dtype, device):
        """1e-50 is positive, and 0 in float32."""
        case = Case("", rows=rows, keys=70, dim=16, causal=True, scale=scale)
        check_forward(case.call(attention), partial(case.inputs, dtype, device))

    @pytest.mark.parametrize("rows", [1, 40])
    def test_an_infinite_value_is_not_nan(self, rows, dtype, device):
        """Of 33 keys the last, beside which a kernel that takes keys in twos has none."""
        q, k, v = (torch.randn(1, 2, n, 48, device=device).to(dtype) for n in (rows, 33, 33))
        v[:, :, -1, 5] = torch.inf
        out = attention(q, k, v)
        assert out[..., 5].isposinf().all()
        v[:, :, -1, 5] = 0
        assert_same_bits(out[..., 6:], attention(q, k, v)[..., 6:])

    @pytest.mark.parametrize("rows", [4, 40])
    @pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-35, 1e35, -0.7])
    def test_scales_that_no_one_needs(self, scale, rows):
        inputs = {name: torch.randn(1, 2, rows, 16) for name in ("query", "key", "value")}
        out, lse = attention(**inputs, scale=scale, causal=True, return_lse=True)
        exact_out, exact_lse = reference.attention(**cast(inputs, torch.float64), scale=scale, causal=True)
        assert_close(out.double(), exact_out, rtol=1e-5, atol=1e-5)
        unit = max(1, scale)
        assert_close(lse / unit, (exact_lse / unit).float(), rtol=1e-5, atol=1e-5)

    def test_sums_of_bfloat16_do_not_stall(self):
        """1 + 1 + ... in bfloat16 stops at 256."""
        ones = torch.ones(1, 1, 1024, 1024, dtype=torch.bfloat16)
        out, lse = attention(ones[..., :1], ones[..., :1], ones[..., :1], scale=0.0, return_lse=True)
        assert_same_bits(out, ones[..., :1])
        assert_close(lse, torch.full_like(lse, math.log(1024)))

    def test_dot_products_of_bfloat16_do_not_stall(self):
        ones = torch.ones(1, 1, 1, 256, dtype=torch.bfloat16)
        _, lse = attention(torch.cat([ones, ones], 2), ones * 2, ones, scale=1.0, return_lse=True)
        assert_same_bits(lse, torch.full_like(lse, 512))
