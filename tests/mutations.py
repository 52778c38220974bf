"""python tests/mutations.py: breaks each CUDA kernel in small ways and looks whether the tests see it.

Changes a file of csrc/cuda, runs a few interpreted tests, and puts the file back; some minutes, most of them nvcc's.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str
    new: str
    tests: str
    """Expression of pytest -k."""


FORWARD = (
    "test_forward and interpreted and float16 and (65x65 or rising or all-at or window-64 or scores-at or heads-6-2)"
)
DECODE = "test_forward and interpreted and float16 and (decode-5 or decode-scores or decode-window or decode-lengths)"
BACKWARD = "test_backward and interpreted and float16 and (65x65 or window-64 or sinks-causal or heads-6-2)"
MERGE = "test_merge and interpreted and float16"

MUTATIONS = [
    Mutation(
        "forward: the accumulator is not rescaled",
        "sm80/forward.cuh",
        "      rescale(acc, factors);\n",
        "",
        FORWARD,
    ),
    Mutation(
        "forward: waits for one copy too few",
        "sm80/forward.cuh",
        "    // O += P V, while the next keys and values are copied.\n    wait_for_copies<1>();",
        "    wait_for_copies<2>();",
        FORWARD,
    ),
    Mutation(
        "mask: a row sees one key more",
        "scores.cuh",
        "first <= column && column < end",
        "first <= column && column <= end",
        FORWARD,
    ),
    Mutation(
        "decode: the states of warps meet without a barrier",
        "sm80/decode.cuh",
        "  states.finish(unit);\n\n  // The results of the warps, in place of rings and queries.\n  __syncthreads();",
        "  states.finish(unit);\n",
        DECODE,
    ),
    Mutation("decode: the accumulator is not rescaled", "sm80/decode.cuh", "    rescale(acc, factors);\n", "", DECODE),
    Mutation("backward: a masked score has weight", "sm80/backward.cuh", "    s = dp = 0;\n", "", BACKWARD),
    Mutation(
        "backward: tiles are overwritten while they are read",
        "sm80/backward.cuh",
        "    __syncthreads();\n    return false;",
        "    return false;",
        BACKWARD,
    ),
    Mutation(
        "merge: an empty state is not guarded",
        "../softmax.h",
        "return select(m == N(kHidden), N(0), m);",
        "return m;",
        MERGE,
    ),
    Mutation(
        "merge: a state is not scaled",
        "merge.cu",
        "out[e] * factors.into + x[e] * factors.from",
        "out[e] * factors.into + x[e]",
        MERGE,
    ),
]


def survives(mutation: Mutation) -> bool:
    path = ROOT / "csrc/cuda" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise SystemExit(
            f"{mutation.name}: its text is {text.count(mutation.old)} times in {mutation.file}, wanted once"
        )
    try:
        path.write_text(text.replace(mutation.old, mutation.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", mutation.tests, "tests"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    finally:
        path.write_text(text)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout + done.stderr)
    seen = [line for line in done.stdout.splitlines() if line.startswith("E  ")]
    print(
        f"{'SURVIVES' if done.returncode == 0 else 'seen':9}{mutation.name}", *seen[:1], sep="\n         ", flush=True
    )
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(min(1, sum(survives(mutation) for mutation in MUTATIONS)))
