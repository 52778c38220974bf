"""Memory is linear in the length: the score matrix is never written."""

import subprocess
import sys
from itertools import product

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from flashsoftmax import attention

MEASURE = """
import resource, torch, flashsoftmax

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # MiB

def step(rows, keys, **options):
    q, k, v = (torch.randn(1, 1, n, 16, requires_grad=True) for n in (rows, keys, keys))
    out, lse = flashsoftmax.attention(q, k, v, return_lse=True, **options)
    (out.sum() + lse.sum()).backward()

torch.set_num_threads(2)
options = dict({options})
step(64, 64, **options)
before = peak()
step({rows}, {keys}, **options)
print(peak() - before)
"""


@pytest.mark.parametrize(
    ("rows", "keys", "options"),
    [
        (16384, 16384, "causal=True"),
        (16384, 8192, "softcap=5.0, sinks=torch.zeros(1), attn_mask=torch.ones(1, 1, dtype=torch.bool)"),
    ],
    ids=["causal", "masked"],
)
def test_forward_and_backward(rows, keys, options):
    code = MEASURE.format(rows=rows, keys=keys, options=options)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    inputs_and_gradients = 2 * 4 * 16 * (2 * rows + 2 * keys) / 2**20
    scores = 4 * rows * keys / 2**20
    allowed = 1.5 * inputs_and_gradients + 16
    grown = float(result.stdout)
    assert grown < allowed, (
        f"grew by {grown:.0f} MiB; inputs and gradients have {inputs_and_gradients:.0f}, scores {scores:.0f}"
    )


SCORES = 4, 8, 300, 280


@pytest.mark.parametrize("shape", list(product(*((1, n) for n in SCORES)))[:-1], ids=str)
def test_gradient_of_a_broadcast_bias_is_not_expanded(shape, device):
    batch, heads, rows, keys = SCORES
    q, k, v = (torch.randn(batch, heads, n, 8, device=device) for n in (rows, keys, keys))
    bias = torch.randn(shape, device=device, requires_grad=True)
    lengths = torch.full((batch,), 16, device=device)  # to take little time
    out = attention(q, k, v, attn_bias=bias, q_lens=lengths, kv_lens=lengths)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        out.sum().backward()
    sizes = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert sum(size for size in sizes if size > 0) > 4 * bias.numel()
    expanded = 4 * out[..., 0].numel() * keys
    # The gradient alone has a quarter of that if only the batch is broadcast.
    assert max(sizes) < expanded / 3, f"{max(sizes)} bytes in one tensor, {expanded} for every score"
