"""Memory is linear in the length: the score matrix is never written."""

import subprocess
import sys

import pytest

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
