"""Hypothesis draws shapes, strides, masks and lengths; the answer is that of dense attention.

In a small problem a naive computation may be exact by luck, so these checks have slack; the cases have none.
"""

import os
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from hypothesis import HealthCheck, given, register_random, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from cases import LAYOUTS, MASKS, Case
from checks import check_backward, check_forward
from flashsoftmax import attention, merge
from test_merge import dense as dense_merge
from test_paged import Pages, step
from test_varlen import Sequences, dense
from test_varlen import call as varlen


class TorchRandom:
    """Lets hypothesis seed torch, so that an example can be run again."""

    seed, getstate, setstate = torch.manual_seed, torch.get_rng_state, torch.set_rng_state


register_random(TorchRandom)
bounded = settings(
    max_examples=int(os.environ.get("FLASHSOFTMAX_EXAMPLES", 60)),
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
SLACK = 8
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
bounds = st.none() | st.integers(0, 60)


@st.composite
def cases(draw):
    group, key_heads = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    batch = draw(st.integers(1, 3))
    keys, rows = draw(st.integers(1, 150)), draw(st.integers(1, 80))
    mask = draw(st.none() | st.sampled_from(sorted(MASKS)))
    biases = [name for name in MASKS if name.startswith("float")]
    with_bias = mask is None or mask.startswith("bool")
    return Case(
        "",
        batch=batch,
        heads=(group * key_heads, key_heads),
        rows=rows,
        keys=keys,
        dim=draw(st.integers(1, 40)),
        value_dim=draw(st.integers(1, 40)),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(bounds, bounds)),
        scale=draw(st.none() | st.floats(-1, 1)),
        softcap=draw(st.none() | st.floats(0.5, 30)),
        alibi=draw(st.booleans() | st.just("per-sequence")),
        sinks=draw(st.booleans()),
        mask=mask,
        bias=draw(st.none() | st.sampled_from(biases)) if with_bias else None,
        q_offset=draw(st.none() | st.integers(-100, 200)),
        kv_lens=draw(st.none() | st.tuples(*[st.integers(0, keys)] * batch)),
        q_lens=draw(st.none() | st.tuples(*[st.integers(0, rows)] * batch)),
        kv_starts=draw(st.none() | st.tuples(*[st.integers(0, keys + 5)] * batch)),
        split_size=draw(st.none() | st.integers(1, 200)),
        layout=draw(st.sampled_from(sorted(LAYOUTS))),
        scores=draw(st.sampled_from(["random", "large"])),
    )


@bounded
@given(cases(), DTYPES)
def test_forward(case, dtype):
    check_forward(case.call(attention), partial(case.inputs, dtype), slack=SLACK)


@bounded
@given(cases(), DTYPES)
def test_backward(case, dtype):
    check_backward(case.call(attention), partial(case.inputs, dtype), slack=SLACK)


@bounded
@given(cases(), st.integers(1, 20), DTYPES)
def test_paged(case, page_size, dtype):
    pages = Pages(page_size, replace(case, kv_lens=case.kv_lens or (case.keys,) * case.batch, mask=None, bias=None))
    check_forward(pages.call, partial(pages.case.inputs, dtype), slack=SLACK)


@bounded
@given(st.data(), DTYPES)
def test_varlen_in_pages(data, dtype):
    lens = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=5))
    lens_q, kv_lens = zip(*lens, strict=True)
    drawn = step(
        "",
        lens_q,
        kv_lens,
        page_size=data.draw(st.integers(1, 20)),
        causal=data.draw(st.booleans()),
        window=data.draw(st.none() | st.tuples(bounds, bounds)),
        kv_starts=data.draw(st.none() | st.tuples(*[st.integers(0, 60)] * len(lens))),
        alibi=data.draw(st.booleans() | st.just("per-sequence")),
        split_size=data.draw(st.none() | st.integers(1, 100)),
    )
    check_forward(drawn.call, partial(drawn.inputs, dtype), drawn.dense, slack=SLACK)


@bounded
@given(st.data(), DTYPES)
def test_varlen(data, dtype):
    lens = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=5))
    options = {"causal": data.draw(st.booleans()), "window": data.draw(st.none() | st.tuples(bounds, bounds))}
    options |= {
        "softcap": data.draw(st.none() | st.floats(0.5, 30)),
        "split_size": data.draw(st.none() | st.integers(1, 100)),
    }
    lens_q, lens_k = zip(*lens, strict=True)
    kv_lens = tuple(data.draw(st.integers(0, n)) for n in lens_k) if data.draw(st.booleans()) else None
    sequences = Sequences(
        "",
        lens_q,
        lens_k,
        dim=16,
        value_dim=8,
        options=tuple(options.items()),
        alibi=data.draw(st.booleans() | st.just("per-sequence")),
        sinks=data.draw(st.booleans()),
        kv_lens=kv_lens,
        layout=data.draw(st.sampled_from(sorted(LAYOUTS))),
    )
    check_forward(varlen, partial(sequences.inputs, dtype), dense, slack=SLACK)
    check_backward(varlen, partial(sequences.inputs, dtype), dense, slack=SLACK)


@bounded
@given(st.data())
def test_merge(data):
    count, shape = data.draw(st.integers(1, 6)), data.draw(st.tuples(*[st.integers(1, 5)] * 4))
    values = st.floats(-1e4, 1e4) | st.sampled_from([-torch.inf, torch.inf])
    numbers = count * shape[0] * shape[1] * shape[2]
    drawn = data.draw(st.lists(values, min_size=numbers, max_size=numbers))
    lses = torch.tensor(drawn, dtype=torch.float64).view(count, *shape[:3])
    outs = torch.randn(count, *shape, dtype=torch.float64).masked_fill(lses.isinf()[..., None], torch.nan)
    assert_close(merge(outs, lses), dense_merge(outs, lses))


@bounded
@given(cases(), st.lists(st.integers(0, 150), max_size=4), DTYPES)
def test_attention_over_parts_merges_to_the_whole(case, cuts, dtype):
    """Cut anywhere; each part says by its lse how much it weighs."""
    sizes = case.batch, case.heads, case.rows, case.keys, case.dim, case.value_dim
    bounds = sorted({0, case.keys, *(min(cut, case.keys) for cut in cuts)})

    def in_parts(query, key, value, **options):
        parts = ((key[:, :, begin:end], value[:, :, begin:end]) for begin, end in pairwise(bounds))
        return merge(*zip(*(attention(query, *part, **options, return_lse=True) for part in parts), strict=True))

    check_forward(in_parts, partial(Case("", *sizes, layout=case.layout).inputs, dtype), slack=SLACK)
