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
from flashsoftmax import attention, attention_paged


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


class TestLargeValues:
    """Values whose weighted sum overflows, although the output, their mean, is finite."""

    ROWS = pytest.mark.parametrize("rows", [2, 40], ids=["decode", "tiled"])
    FEATURES = ("heads-6-2", "sinks-mask-lengths", "mask-float-hides", "starts-mask-bool", "bias-hides-mask-bool")
    FEATURES += ("dropout", "all-features", "all-features-decode")

    def inputs(self, rows, keys, dtype, device="cpu"):
        return [torch.randn(1, 2, n, 24, device=device).to(dtype) for n in (rows, keys, keys)]

    @ROWS
    @pytest.mark.parametrize("keys", [16, 300])
    @pytest.mark.parametrize("share", [0.3, -0.3, 0.993])
    def test_mean_of_equal_values(self, share, keys, rows, dtype, device):
        """share: of the dtype's maximum. 300 keys are three splits of decode; 0.993 overflows at the second key."""
        q, k, v = self.inputs(rows, keys, dtype, device)
        large = torch.full_like(v, share * torch.finfo(dtype).max)
        out, lse = attention(q, k, large, split_size=128, return_lse=True)
        assert_close(out, large[:, :, :1].expand_as(out), rtol=3e-6 if dtype == torch.float32 else 0, atol=0)
        assert_same_bits(lse, attention(q, k, v, split_size=128, return_lse=True)[1])

    @ROWS
    @pytest.mark.parametrize("sinks", [None, [0.5, -3.0]])
    def test_float64(self, sinks, rows):
        q, k, v = self.inputs(rows, 16, torch.float64)
        v = v.sign() * 1e308
        v[..., :12] = v[..., :12].abs()
        sinks = sinks and torch.tensor(sinks, dtype=torch.float64)
        assert_close(attention(q, k, v, sinks=sinks), attention(q, k, v * 1e-10, sinks=sinks) * 1e10)

    @pytest.mark.parametrize("name", FEATURES)
    def test_matches_dense_attention(self, name, dtype, device):
        """Half of the columns have values of one sign, so their sums overflow."""

        def large(dtype, device):
            inputs = case(name).inputs(dtype, device)
            v = inputs["value"] * (torch.finfo(dtype).max / 12)
            half = v.shape[-1] // 2
            return inputs | {"value": torch.cat([v[..., :half].abs(), v[..., half:]], -1)}

        check_forward(case(name).call(attention), partial(large, dtype, device))

    @ROWS
    def test_other_columns_and_rows_keep_their_bits(self, rows, device):
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = self.inputs(rows, 70, dtype, device)
            large = v.clone()
            large[..., 5] = 1e38
            found, expected = attention(q, k, large), attention(q, k, v)
            assert_close(found[..., 5], torch.full_like(found[..., 5], 1e38), rtol=1e-6, atol=0)
            found[..., 5] = expected[..., 5]
            assert_same_bits(found, expected)
            # The last row does not see the large values.
            mask = torch.ones(rows, 70, dtype=torch.bool, device=device)
            mask[-1, :30] = False
            large, small = v.clone(), v.clone()
            large[:, :, :30], small[:, :, :30] = 1e38, 0
            found = attention(q, k, large, mask)
            assert found.isfinite().all()
            assert_same_bits(found[:, :, -1], attention(q, k, small, mask)[:, :, -1])

    @ROWS
    def test_infinity_and_nan_stay(self, rows, device):
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = self.inputs(rows, 33, dtype, device)
            v[:] = 1e38
            v[:, :, 20, 3], v[:, :, 4, 5], v[:, :, 32, 7] = torch.inf, torch.nan, -torch.inf
            out = attention(q, k, v)
            assert out[..., 3].isposinf().all() and out[..., 5].isnan().all() and out[..., 7].isneginf().all()
            assert out[..., [d for d in range(24) if d not in (3, 5, 7)]].isfinite().all()

    @ROWS
    def test_pages(self, rows, device):
        """The first page is not read, since no query sees it: it does not exist."""
        q, k, v = self.inputs(rows, 80, torch.float32, device)
        v = v.abs() * 5e37
        table = torch.tensor([[-1, 3, 0, 5, 1]], dtype=torch.int32, device=device)
        pools = [torch.full((6, 16, 2, 24), torch.nan, device=device) for _ in "kv"]
        for pool, x in zip(pools, (k, v), strict=True):
            for n in range(1, 5):
                pool[table[0, n]] = x[0, :, 16 * n : 16 * n + 16].transpose(0, 1)
        options = {"window": (64 - rows, 0), "kv_lens": torch.tensor([80], device=device)}
        found = attention_paged(q, *pools, table, **options)
        assert found.isfinite().all()
        assert_close(found, attention(q, k, v, **options), rtol=1e-5, atol=0)

    @ROWS
    def test_gradients(self, rows, device):
        q, k, v = self.inputs(rows, 16, torch.float32, device)
        v = torch.full_like(v, 1e38).requires_grad_()
        out = attention((q * 0).requires_grad_(), k.requires_grad_(), v)
        grads = torch.autograd.grad(out, (k, v), torch.full_like(out, 1e-3))
        assert all(x.isfinite().all() for x in grads)
        assert_close(grads[1], torch.full_like(v, rows / 16 * 1e-3))
