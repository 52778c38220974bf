"""Gradients where |lse| is large: there m + ln l in one float32 loses ln l, and with it the weights."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import reference
from checks import assert_accurate_draws, cast, gradients, random_gradients
from flashsoftmax import attention, merge

LOWEST = torch.finfo(torch.float32).min
ROWS = pytest.mark.parametrize("rows", [1, 5, 70], ids=lambda rows: f"rows-{rows}")


def attend(**inputs):
    return attention(**inputs, scale=1, return_lse=True)


def dense(**inputs):
    return reference.attention(**inputs, scale=1)


def dense_textbook(value, **inputs):
    """The textbook backward, with scores shifted so that lse is small. The shift changes no gradient."""
    s = reference.scores(**inputs, scale=1)
    s = s - s.detach().amax(-1, keepdim=True)
    return reference.Textbook.apply(s, pad(value, (0, 0, 0, 1)), torch.logsumexp(s, -1))


def dense_merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """merge, computed in the dtype of lses."""
    weights = torch.softmax(lses, 0)[..., None]
    return (weights * outs.to(lses.dtype)).sum(0), torch.logsumexp(lses, 0)


def check_gradients(call, exact, naive, draw, of=("out", "lse")) -> None:
    def errors(inputs):
        upstream, names = random_gradients(call, inputs, of), list(inputs)
        found = gradients(call, inputs, upstream, names)
        expected = gradients(exact, cast(inputs, torch.float64), upstream, names)
        allowed = [gradients(naive_call, inputs, upstream, names) for naive_call in naive]
        return list(zip([f"gradient of {name}" for name in names], found, expected, *allowed, strict=True))

    assert_accurate_draws(errors, draw, slack=2)  # scores are few, so roundings do not average out


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("size", [1, 2**14, 2**20, -(2**20), -(2**24), 2**26], ids="score-{:.0e}".format)
@ROWS
def test_scores_of_any_size(device, rows, size, sinks):
    """Scores are near `size`, and multiples of `step`: numbers of float32, in whatever order they are summed."""
    step = abs(size) / 2**22

    def draw():
        query = torch.randint(-1, 2, (1, 2, rows, 24)).float()
        key = step * torch.round(max(0.5, step / 2) / step * torch.randn(1, 2, 48, 24))
        value = torch.randn(1, 2, 48, 24)
        mask = torch.full((1, 2, rows, 48), float(size))
        inputs = {"query": query, "key": key, "value": value, "attn_mask": mask}
        inputs |= {"sinks": torch.full((2,), float(size))} if sinks else {}
        return {name: x.to(device) for name, x in inputs.items()}

    for of in [("out", "lse"), ("out",), ("lse",)]:
        check_gradients(attend, dense, (dense, dense_textbook), draw, of)


def check_halves(inputs: dict, rows: int) -> None:
    """A value's gradient is the sum of the weights that queries give it, where all of the output's is 1."""
    grad = torch.ones_like(inputs["query"])
    (found,) = gradients(attend, inputs, (grad, None), ["value"])
    torch.testing.assert_close(found, torch.full_like(found, rows / 2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("score", [LOWEST, -1e8, -1e4, 0.0, 1e4, 1e6, 1e7, 1e8, 1e30], ids="{:.0e}".format)
@ROWS
def test_two_keys_of_one_bias_weigh_a_half_each(device, dtype, rows, score):
    query, key, value = (torch.randn(1, 1, n, 16).to(device, dtype) for n in (rows, 2, 2))
    mask = torch.full((1, 1, rows, 2), score, device=device)
    check_halves({"query": 0 * query, "key": key, "value": value, "attn_mask": mask}, rows)


@pytest.mark.parametrize("root", [1, 2**7, 2**10, 2**12, 2**13, 2**15], ids="root-{}".format)
@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
@ROWS
def test_two_keys_of_one_product_weigh_a_half_each(device, dtype, rows, sign, root):
    query, key, value = (torch.full((1, 1, n, 16), float(root), device=device, dtype=dtype) for n in (rows, 2, 2))
    check_halves({"query": query, "key": sign * key, "value": value}, rows)


@pytest.mark.parametrize("score", [LOWEST, -1e8, 1e8], ids="{:.0e}".format)
@ROWS
def test_a_sink_of_the_score_of_a_key_weighs_a_half(device, dtype, rows, score):
    query, key, value = (torch.zeros(1, 1, n, 16, device=device, dtype=dtype) for n in (rows, 1, 1))
    inputs = {"query": query, "key": key, "value": value, "attn_mask": torch.full((1, 1, rows, 1), score).to(device)}
    inputs["sinks"] = torch.full((1,), score, device=device)
    grad = torch.ones(1, 1, rows, device=device)
    (found,) = gradients(attend, inputs, (None, grad), ["sinks"])
    torch.testing.assert_close(found, torch.full_like(found, rows / 2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("states", [1, 2, 5])
@pytest.mark.parametrize("lse", [0, -(2**14), 2**20, -(2**24), 2**26], ids="lse-{:.0e}".format)
def test_merge_of_states_of_any_lse(device, dtype, lse, states):
    """States differ by little more than float32 can tell apart."""
    step = max(1, abs(lse) // 2**22)

    def draw():
        outs = torch.randn(states, 1, 2, 70, 24).to(device, dtype)
        lses = lse + step * torch.randint(0, 2, (states, 1, 2, 70)).to(device, torch.float32)
        return {"outs": outs, "lses": lses}

    check_gradients(merge, dense_merge, (dense_merge,), draw)


@pytest.mark.parametrize("lse", [LOWEST, -1e8, 1e4, 1e8, 1e30], ids="{:.0e}".format)
def test_merge_of_two_states_of_one_lse_weighs_a_half_each(device, dtype, lse):
    outs = torch.randn(2, 1, 2, 70, 24).to(device, dtype)
    inputs = {"outs": outs, "lses": torch.full((2, 1, 2, 70), lse, device=device)}
    grad = torch.randn(1, 2, 70, 24).to(device, dtype)
    (found,) = gradients(merge, inputs, (grad, None), ["outs"])
    torch.testing.assert_close(found, (grad / 2).expand_as(found), rtol=0, atol=0)
    (found,) = gradients(merge, inputs, (None, torch.ones(1, 2, 70, device=device)), ["lses"])
    torch.testing.assert_close(found, torch.full_like(found, 0.5), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 1e9}], ids=str)
@pytest.mark.parametrize("scale", [1e2, 1e4, 1e6, 1e8], ids="scale-{:.0e}".format)
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 70])
def test_rows_of_one_weight(device, rows, scale, options):
    """The largest score of a row is far above the others: its weight is exactly 1, in the backward too."""
    query, key, value = torch.randn(1, 4, rows, 64), torch.randn(1, 2, 120, 64), torch.randn(1, 2, 120, 64)
    inputs = {"query": query, "key": key, "value": value, "scale": scale, **options}
    upstream = torch.randn(1, 4, rows, 64), None
    (found,) = gradients(lambda **x: attention(**x, return_lse=True), inputs, upstream, ["value"])
    (exact,) = gradients(reference.attention, cast(inputs, torch.float64), upstream, ["value"])
    (naive,) = gradients(reference.attention, inputs, upstream, ["value"])
    allowed = 2 * (naive - exact).abs().max() + 4 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert (found - exact).abs().max() <= allowed
