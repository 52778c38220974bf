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
APPEND = "test_append and interpreted and float16 and (contiguous or paged or rotary)"
PLACES = "test_append and interpreted and without_a_place"
LONGER = "test_gpu and interpreted and longer_than_its_maximum"
PAGES = "test_gpu and interpreted and pages_that_no_query_sees"
LARGE_LSE = "test_large_lse and interpreted and float16 and (of_one or weighs_a_half)"

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
        "forward: rows behind the launched tiles are not NaN",
        "sm80/forward.cuh",
        "seq.q_len, task.q_tile, params.order.q_tiles);",
        "min(seq.q_len, params.order.q_tiles * kQueries), task.q_tile, params.order.q_tiles);",
        LONGER,
    ),
    Mutation(
        "backward: no tile for a maximum of 0 queries",
        "sm80/backward.cuh",
        "max<int64_t>(1, min(forward.seqlen_q, forward.rows_q))",
        "min(forward.seqlen_q, forward.rows_q)",
        LONGER,
    ),
    Mutation(
        "forward: as many tiles as max_seqlen_q has",
        "sm80/forward.cuh",
        "(min(args.seqlen_q, args.rows_q) + Shape",
        "(args.seqlen_q + Shape",
        "test_gpu and interpreted and beyond_the_rows",
    ),
    Mutation(
        "forward: all pages have to exist",
        "sm80/forward.cuh",
        "pages_exist(args, task.b, begin, end)",
        "pages_exist(args, task.b, 0, seq.band.kv_len)",
        PAGES,
    ),
    Mutation(
        "tile: reads pages before the window",
        "tile.cuh",
        "bool exists = hidden <= n && n < rows;",
        "bool exists = n < rows;",
        PAGES,
    ),
    Mutation(
        "decode: all pages of a split have to exist",
        "sm80/decode.cuh",
        "pages_exist(args, block.b, block.j0 + block.first, block.j0 + block.last)",
        "pages_exist(args, block.b, 0, seq.band.kv_len)",
        PAGES,
    ),
    Mutation(
        "decode: a scale that is 0 in float32 is left to the exponential",
        "sm80/decode.cuh",
        "  const bool plain = args.scale_in_exp();\n",
        "  const bool plain = args.plain_scores();\n",
        "test_forward and interpreted and no_exponential and decode",
    ),
    Mutation(
        "backward: what lse loses is left out",
        "rows.cuh",
        "ExpFor<T>().unit, -lse_error)",
        "ExpFor<T>().unit, 0)",
        LARGE_LSE,
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
    Mutation(
        "append: the sine of the second element has the wrong sign",
        "copy_rows.cu",
        "x * s + y * c",
        "y * c - x * s",
        APPEND,
    ),
    Mutation("append: a row without a place is written", "copy_rows.cu", "if (!place.valid) return;", "", PLACES),
    Mutation(
        "append: all rows are at one position",
        "copy_rows.cu",
        "rotary_position(rotary, b, i)",
        "rotary_position(rotary, b, 0)",
        APPEND,
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
