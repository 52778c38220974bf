"""Masks that hide whole tiles: the answer is that of dense attention, and hidden tiles take no part."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import inf, nan

import interpreter
from cases import Case
from checks import assert_same_bits, check_backward, check_forward, gradients, random_gradients
from flashsoftmax import attention
from flashsoftmax.library import ARGUMENTS
from operators import attention_backward
from test_properties import DTYPES, SLACK, bounded

ROWS = pytest.mark.parametrize("rows", [3, 100], ids=["decode", "tiled"])
KEYS = 1400
WRT = ["query", "key", "value"]
call = Case("", split_size=512).call(attention)


def on_interpreter(dtype=torch.bfloat16, broadcast="heads", is_bias=False, **parameters):
    return dtype == torch.bfloat16 and (broadcast, is_bias) in [("heads", False), ("keys", False), ("rows", True)]


def make(rows, dtype, device="cpu", heads=(4, 2), keys=KEYS, **options):
    return Case("", batch=2, heads=heads, rows=rows, keys=keys, dim=16, **options).inputs(dtype, device)


def as_float(mask):
    return torch.zeros(mask.shape).masked_fill(~mask, -inf)


# --- the answer ---


@st.composite
def block_masks(draw, batch, heads, rows, keys):
    """Blocks that are hidden, shown or mixed, in all ways to broadcast and to store a mask."""
    size = [n if draw(st.booleans()) else 1 for n in (batch, heads, rows, keys)]
    block = draw(st.sampled_from([1, 16, 20, 48])), draw(st.sampled_from([1, 32, 50, 200]))
    blocks = [*size[:2], *(-(-n // step) for n, step in zip(size[2:], block, strict=True))]
    kinds = torch.randint(3, blocks).repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)
    kinds = kinds[:, :, : size[2], : size[3]]
    mask = (kinds == 1) | ((kinds == 2) & (torch.rand(size) < 0.6))
    if draw(st.booleans()):
        mask = mask.expand(batch, heads, rows, keys)
    if draw(st.booleans()):
        mask = mask.mT.contiguous().mT
    elif draw(st.booleans()):
        mask = torch.stack([mask, ~mask], -1)[..., 0]
    if draw(st.booleans()):
        return mask
    bias = torch.randn(mask.shape) if draw(st.booleans()) else torch.zeros(mask.shape)
    return bias.masked_fill(~mask, -inf)


@st.composite
def masked_cases(draw):
    group, key_heads, batch = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    rows = draw(st.integers(1, 16) | st.integers(17, 130))
    keys = draw(st.integers(1, 500))
    case = Case(
        "",
        batch=batch,
        heads=(group * key_heads, key_heads),
        rows=rows,
        keys=keys,
        dim=draw(st.integers(1, 24)),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(st.none() | st.integers(0, 300), st.none() | st.integers(0, 100))),
        softcap=draw(st.none() | st.just(3.0)),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        kv_lens=draw(st.none() | st.tuples(*[st.integers(0, keys)] * batch)),
        split_size=draw(st.none() | st.integers(1, 300)),
    )
    return case, draw(block_masks(batch, group * key_heads, rows, keys))


@bounded
@given(masked_cases(), DTYPES)
def test_block_masks(drawn, dtype):
    case, mask = drawn
    mask = mask.to(dtype) if mask.is_floating_point() else mask

    def inputs():
        return case.inputs(dtype) | {"attn_mask": mask}

    check_forward(case.call(attention), inputs, slack=SLACK)
    check_backward(case.call(attention), inputs, slack=SLACK)


def causal(rows, keys):
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


# A bool mask, and the options that show the same keys.
AS_OPTIONS = {
    "causal": (causal, {"causal": True}),
    "window": (lambda m, n: causal(m, n) & ~causal(m, n).tril(n - m - 71), {"causal": True, "window": (70, 0)}),
    "lengths": (
        lambda m, n: (torch.arange(n) < 300).expand(m, n),
        {"kv_lens": torch.tensor([300, 300]), "q_offset": 0},
    ),
}


@ROWS
@pytest.mark.parametrize("rule", AS_OPTIONS)
def test_mask_is_as_accurate_as_the_options(rule, rows, dtype, device):
    mask, options = AS_OPTIONS[rule]
    inputs = make(rows, dtype, device)
    masked = inputs | {"attn_mask": mask(rows, KEYS).to(device)}
    grads = random_gradients(call, inputs)
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    wanted = [*call(**inputs | options), *gradients(call, inputs | options, grads, WRT)]
    found = [*call(**masked), *gradients(call, masked, grads, WRT)]
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=16 * torch.finfo(dtype).eps * y[y.isfinite()].abs().max().item())


# --- bits ---


def scattered(rows, keys=KEYS):
    """Hides keys, but no tile."""
    mask = torch.rand(2, 1, rows, keys) < 0.5
    mask[..., ::8] = True
    return mask


@ROWS
def test_same_bits_however_the_mask_is_stored(rows, dtype, device):
    """A bool mask and a bias of 0 and -inf differ in nothing else."""
    inputs, mask = make(rows, dtype, device), scattered(rows).to(device)
    grads = random_gradients(call, inputs)
    results = []
    for stored in (
        mask,
        mask.expand(2, 4, rows, KEYS),
        mask.mT.contiguous().mT,
        torch.stack([mask, ~mask], -1)[..., 0],
        as_float(mask).to(device),
    ):
        masked = inputs | {"attn_mask": stored}
        results.append([*call(**masked), *gradients(call, masked, grads, WRT)])
    for result in results[1:]:
        assert_same_bits(result, results[0])


@ROWS
def test_bits_do_not_depend_on_the_batch_or_on_threads(rows, threads):
    inputs = make(rows, torch.float32)
    mask = scattered(rows) & (torch.arange(KEYS) // 100 % 3 > 0)
    mask[1, :, : rows // 2] = False
    masked = inputs | {"attn_mask": mask}
    grads = random_gradients(call, masked)
    both = []
    for count in (1, 2, 3):
        threads(count)
        both.append([*call(**masked), *gradients(call, masked, grads, WRT)])
    for result in both[1:]:
        assert_same_bits(result, both[0])
    for b in range(2):
        alone = {name: masked[name][b : b + 1] for name in (*WRT, "attn_mask")}
        own_grads = tuple(grad[b : b + 1] for grad in grads)
        assert_same_bits(
            [*call(**alone), *gradients(call, alone, own_grads, WRT)], [result[b : b + 1] for result in both[0]]
        )


# --- what a hidden tile holds ---

# Keys that no row sees, in tiles that are hidden whole.
HIDDEN = {
    "leading": slice(0, 512),
    "middle": slice(512, 1024),
    "trailing": slice(1024, KEYS),
    "all": slice(0, KEYS),
}


@ROWS
@pytest.mark.parametrize("is_bias", [False, True], ids=["bool", "float"])
@pytest.mark.parametrize("broadcast", ["keys", "rows", "heads"])
@pytest.mark.parametrize("where", HIDDEN)
def test_nan_in_a_hidden_tile_reaches_nothing(where, broadcast, is_bias, rows, dtype, device):
    """Neither a result nor a gradient, though 0 * NaN is NaN: hidden tiles are not multiplied."""
    inputs, keys = make(rows, dtype), HIDDEN[where]
    shape = {"keys": (1, 1, 1, KEYS), "rows": (2, 1, rows, KEYS), "heads": (1, 4, rows, KEYS)}[broadcast]
    mask = torch.rand(shape) < 0.8
    mask[..., keys] = False
    inputs["attn_mask"] = as_float(mask).to(dtype) if is_bias else mask
    inputs = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    poisoned = inputs | {name: inputs[name].clone() for name in ("key", "value")}
    poisoned["key"][:, :, keys] = poisoned["value"][:, :, keys] = nan
    grads = random_gradients(call, inputs)
    wrt = [*WRT, "attn_mask"] if is_bias else WRT
    found, wanted = ([*call(**x), *gradients(call, x, grads, wrt)] for x in (poisoned, inputs))
    assert_same_bits(found, wanted)
    assert all(x[:, :, keys].eq(0).all() for x in found[3:5])
    if is_bias:
        assert found[5][..., keys].eq(0).all()


@pytest.mark.parametrize("size", [(1, 1, 1, 1), (2, 4, 100, KEYS), (1, 4, 1, KEYS), (2, 1, 100, 1)])
def test_the_gradient_of_a_hidden_tile_is_0_in_every_sum(size, device):
    inputs = make(100, torch.float32, device)
    bias = torch.randn(size, device=device)
    if size[3] > 1:
        bias[..., 256:768] = -inf
    if size[2] > 1:
        bias[:, :, 32:64] = -inf
    wrt = [*WRT, "attn_mask"]
    check_backward(call, inputs | {"attn_mask": bias}, slack=SLACK)
    found = gradients(call, inputs | {"attn_mask": bias}, (torch.ones_like(inputs["query"]), None), wrt)
    assert found[3].shape == torch.Size(size) and not found[3][bias == -inf].any()


@ROWS
def test_rows_that_see_nothing(rows, dtype, device):
    """Output 0, lse -inf, gradient 0, in a hidden tile and in one that others see, whatever the row holds."""
    inputs = make(rows, dtype, device)
    mask = torch.rand(2, 1, rows, KEYS) < 0.9
    hidden = torch.zeros(rows, dtype=torch.bool)
    hidden[rows - 1] = hidden[: rows // 2] = True
    mask[:, :, hidden] = False
    masked = inputs | {"attn_mask": mask.to(device)}
    grads = random_gradients(call, masked)
    masked["query"][:, :, hidden] = grads[0][:, :, hidden] = nan
    out, lse = call(**masked)
    assert not out[:, :, hidden].any() and (lse[:, :, hidden] == -inf).all()
    assert out[:, :, ~hidden].isfinite().all()
    found = gradients(call, masked, grads, WRT)
    assert not found[0][:, :, hidden].any() and all(x.isfinite().all() for x in found)


def test_a_visible_nan_is_not_hidden(device):
    inputs = make(100, torch.float32, device)
    mask = torch.zeros(100, KEYS, dtype=torch.bool, device=device)
    mask[50:, 700:1000] = True
    inputs["key"][:, :, 800] = nan
    out, _ = call(**inputs | {"attn_mask": mask})
    assert out[:, :, 50:].isnan().all() and not out[:, :, :50].any()


# --- work ---


def launches(rows, mask):
    """What the GPU's kernels did in a forward and a backward, by name; without the one that makes the map."""
    inputs = make(rows, torch.bfloat16, heads=(2, 1))
    values = dict.fromkeys(ARGUMENTS["attention"]) | {name: inputs[name] for name in WRT} | {"attn_mask": mask}
    values |= {
        "max_seqlen_q": rows,
        "max_seqlen_k": KEYS,
        "scale": 0.25,
        "softcap": 0.0,
        "dropout_p": 0.0,
        "split_size": 2048,
    }
    operators = interpreter.operators()
    with interpreter.session() as run:
        out, lse, lse_error = operators.attention(**values)
        operators.attention_backward(**attention_backward(values, out, None, out, lse, lse_error))
    return {launch.kernel: launch for launch in run.launches if "map_kernel" not in launch.kernel}


@pytest.mark.interpreted
@pytest.mark.skipif(interpreter.unavailable() is not None, reason=str(interpreter.unavailable()))
@ROWS
def test_work_follows_what_is_shown(rows):
    """300 of 1,400 keys, in tiles of at most 64: at most 384. The others are neither read nor multiplied."""
    mask = torch.zeros(1, 1, rows, KEYS, dtype=torch.bool)
    mask[..., 700:1000] = True
    some, everything = launches(rows, mask), launches(rows, None)
    assert some.keys() == everything.keys() and len(some) == 4
    for name, launch in some.items():
        assert launch.mmas <= 0.28 * everything[name].mmas, name
    forward = next(name for name in some if "forward" in name or "decode" in name)
    inputs_read = 2 * 32 * (2 * rows + 2 * 384)  # batch, bytes per row, query heads, keys and values
    assert some[forward].distinct_bytes_read <= inputs_read + 8192 < everything[forward].distinct_bytes_read / 2
