"""The same bits in every run, whatever else is in the call and however many threads there are."""

import pytest
import torch

from cases import Case
from checks import assert_same_bits, gradients, is_real, random_gradients
from flashsoftmax import attention, attention_varlen, merge

ROWS = pytest.mark.parametrize("rows", [1, 7, 70], ids=["one-row", "decode", "tiled"])
WRT = ["query", "key", "value"]
call = Case("", split_size=128).call(attention)


def on_interpreter(dtype, **parameters):
    return dtype == torch.float16


def make(rows, dtype, device="cpu", **options):
    sizes = {"batch": 3, "heads": (6, 2), "rows": rows, "keys": 600, "dim": 24, "value_dim": 40}
    return Case("", **sizes | {"causal": True, "softcap": 8.0, "alibi": True, "sinks": True} | options).inputs(
        dtype, device
    )


def everything(inputs, grads):
    wrt = [name for name in (*WRT, "attn_mask", "sinks") if is_real(inputs.get(name))]
    return [*call(**inputs), *gradients(call, inputs, grads, wrt)]


@ROWS
def test_of_the_number_of_threads(rows, dtype, threads):
    inputs = make(rows, dtype, mask="float-2d")
    grads = random_gradients(call, inputs)
    results = []
    for count in (1, 2, 3, 3):
        threads(count)
        results.append(everything(inputs, grads))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("rows", [1, 16, 17, 70])
def test_of_the_number_of_threads_where_they_share_one_head(rows, dtype, threads):
    """There is less to share out than threads, unless the splits are."""
    inputs = make(rows, dtype, batch=1, heads=(1, 1), keys=2500, dim=8)
    grads = random_gradients(call, inputs)
    results = []
    for count in (1, 2, 3, 8):
        threads(count)
        results.append(everything(inputs, grads))
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_of_who_runs_first(threads):
    """More threads than cores, many times: whoever has to wait for another does so."""
    inputs = Case("", batch=3, heads=(4, 2), rows=150, keys=400, dim=8, sinks=True).inputs(torch.float32)
    grads = random_gradients(call, inputs)
    threads(1)
    expected = everything(inputs, grads)
    for count in [2, 3, 5, 8, 16] * 10:
        threads(count)
        assert_same_bits(everything(inputs, grads), expected)


@ROWS
def test_of_the_batch(rows, dtype, device):
    inputs = make(rows, dtype, device, mask="bool")
    grads = random_gradients(call, inputs)
    together = [*call(**inputs), *gradients(call, inputs, grads, WRT)]
    for b in range(3):
        one = inputs | {name: inputs[name][b : b + 1] for name in (*WRT, "attn_mask")}
        alone = [*call(**one), *gradients(call, one, [g[b : b + 1] for g in grads], WRT)]
        assert_same_bits(alone, [x[b : b + 1] for x in together])


@ROWS
def test_of_the_other_heads(rows, dtype, device):
    inputs = make(rows, dtype, device)
    grads = random_gradients(call, inputs)
    together = everything(inputs, grads)
    for group in range(2):
        q, k = slice(3 * group, 3 * group + 3), slice(group, group + 1)
        one = inputs | {name: inputs[name][:, k] for name in ("key", "value")} | {"query": inputs["query"][:, q]}
        one |= {name: inputs[name][q] for name in ("alibi_slopes", "sinks")}
        alone = everything(one, [g[:, q] for g in grads])
        heads = [q, q, q, k, k]
        assert_same_bits(alone[:5], [x[:, h] for x, h in zip(together[:5], heads, strict=True)])
        assert_same_bits(alone[5], together[5][q])


@ROWS
def test_of_sharing_keys_between_heads(rows, dtype, device):
    """Grouped queries have the bits of keys repeated for each head. Gradients are summed over the group."""
    inputs = make(rows, dtype, device)
    repeated = inputs | {name: inputs[name].repeat_interleave(3, 1) for name in ("key", "value")}
    assert_same_bits(call(**repeated), call(**inputs))


@ROWS
def test_of_the_padding_of_the_cache(rows, dtype, device):
    inputs = make(rows, dtype, device, kv_lens=(600, 17, 330))
    grads = random_gradients(call, inputs)
    before = everything(inputs, grads)
    padded = inputs | {
        name: torch.nn.functional.pad(inputs[name], (0, 0, 0, 500), value=torch.nan) for name in ("key", "value")
    }
    after = everything(padded, grads)
    for i in (3, 4):
        assert not after[i][:, :, 600:].any()
        after[i] = after[i][:, :, :600]
    assert_same_bits(after, before)


def test_of_the_length_that_kv_lens_says(dtype, device):
    """A sequence in a padded cache has the bits of the sequence alone."""
    inputs = make(5, dtype, device, batch=1, kv_lens=(330,))
    cut = {name: x for name, x in inputs.items() if name != "kv_lens"} | {
        name: inputs[name][:, :, :330] for name in ("key", "value")
    }
    assert_same_bits(call(**inputs), call(**cut))


@ROWS
def test_of_the_padding_before_kv_starts(rows, dtype, device):
    """A sequence in a left-padded cache has the bits of the sequence alone; the padding has gradient 0."""
    inputs = make(rows, dtype, device, batch=1, keys=330)
    grads = random_gradients(call, inputs)
    padded = inputs | {"kv_starts": torch.tensor([270], device=device)}
    padded |= {
        name: torch.nn.functional.pad(inputs[name], (0, 0, 270, 0), value=torch.nan) for name in ("key", "value")
    }
    after = everything(padded, grads)
    for i in (3, 4):
        assert not after[i][:, :, :270].any()
        after[i] = after[i][:, :, 270:]
    assert_same_bits(after, everything(inputs, grads))


@pytest.mark.parametrize("max_seqlen_q", [4, 60], ids=["decode", "tiled"])
def test_of_the_other_sequences(max_seqlen_q, dtype, device):
    lens_q, lens_k = torch.tensor([3, 1, 4, 2]) * max_seqlen_q // 4, torch.tensor([90, 700, 41, 0])
    q, k, v = torch.randn(int(lens_q.sum()), 4, 16), torch.randn(831, 2, 16), torch.randn(831, 2, 24)
    inputs = {"query": q.to(device, dtype), "key": k.to(device, dtype), "value": v.to(device, dtype)}

    def varlen(query, key, value, lens_q, lens_k):
        cu = [torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(device) for lens in (lens_q, lens_k)]
        return attention_varlen(
            query,
            key,
            value,
            *cu,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=700,
            causal=True,
            split_size=128,
            return_lse=True,
        )

    def whole(**inputs):
        return varlen(**inputs, lens_q=lens_q, lens_k=lens_k)

    grads = random_gradients(whole, inputs)
    together = [*whole(**inputs), *gradients(whole, inputs, grads, WRT)]
    q_end, k_end = lens_q.cumsum(0), lens_k.cumsum(0)
    for i in range(4):
        rows, keys = slice(q_end[i] - lens_q[i], q_end[i]), slice(k_end[i] - lens_k[i], k_end[i])

        def one(i=i, **inputs):
            return varlen(**inputs, lens_q=lens_q[i : i + 1], lens_k=lens_k[i : i + 1])

        part = {"query": inputs["query"][rows], "key": inputs["key"][keys], "value": inputs["value"][keys]}
        alone = [*one(**part), *gradients(one, part, (grads[0][rows], grads[1][:, rows]), WRT)]
        assert_same_bits(
            alone,
            [
                together[0][rows],
                together[1][:, rows],
                together[2][rows],
                together[3][keys],
                together[4][keys],
            ],
        )


def test_of_merge(dtype, threads, device):
    outs, lses = torch.randn(5, 3, 40, 9, 24).to(device, dtype), torch.randn(5, 3, 40, 9, device=device)
    expected = merge(outs, lses)
    for count in (1, 2, 3):
        threads(count)
        assert_same_bits(merge(outs, lses), expected)
    assert_same_bits(merge(outs[:, 1:2, 7:9], lses[:, 1:2, 7:9]), [x[1:2, 7:9] for x in expected])
