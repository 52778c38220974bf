"""Times attention beside every installed peer and beside the limit of the machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .support.check import check
from .support.command import Run, names, parser
from .support.contenders import contenders
from .support.limits import limit
from .support.shapes import DTYPES, SUITES, Shape
from .support.throughput_result import UNITS, Result, closing, picture, table
from .support.timing import interleaved

KV_BYTES = 2**32
"""Shapes with more bytes of keys and values are left out."""

Case = tuple[Shape, str]


def cases(suite: str, dtypes: Sequence[str]) -> list[Case]:
    shapes = SUITES[suite]
    return [(x, dtype) for dtype in dtypes for x in shapes if x.kv_bytes(DTYPES[dtype]) <= KV_BYTES]


def measure(suite: str, case: Case, device: str, rounds: int) -> Result:
    shape, dtype = case
    inputs = shape.inputs(DTYPES[dtype], device)
    best = limit(shape, inputs, device)
    timed, missing = contenders(shape, inputs, device)
    times = interleaved({**timed, best.name: best.timed}, device, rounds)
    limit_seconds = times.pop(best.name)
    decode = shape.kind == "decode"
    unit = "GB/s" if decode else "TFLOP/s" if device == "cuda" else "GFLOP/s"
    return Result(
        suite=suite,
        shape=shape,
        dtype=dtype,
        work=shape.kv_bytes(DTYPES[dtype]) if decode else shape.flops,
        unit=unit,
        seconds=times,
        limit=best.name,
        limit_rounds=[best.work / seconds / UNITS[unit] for seconds in limit_seconds],
        missing=missing,
    )


def check_all(chosen: Sequence[Case], run: Run) -> float:
    """The largest error as a share of the allowed error. Exits at the first error that is larger than allowed."""
    largest = 0.0
    for shape, dtype in run.track("checking", chosen, described):
        share = check(shape, shape.inputs(DTYPES[dtype], run.options.device))
        if not share <= 1:
            raise SystemExit(f"wrong: {dtype} {shape}: the error is {share:.2f} x the allowed error")
        largest = max(largest, share)
    return largest


def described(case: Case) -> str:
    return f"{case[1]} {case[0]}"


def main(argv: Sequence[str]) -> None:
    options = parser("throughput")
    options.add_argument(
        "--suite", type=names(list(SUITES)), help=f"some of {','.join(SUITES)}; default: prefill,backward,decode"
    )
    options.add_argument(
        "--rounds", type=int, default=7, help="rounds of timing, of which the median counts; default: %(default)s"
    )
    run = Run.start(options, argv)
    device, dtypes, rounds = run.options.device, run.options.dtype, run.options.rounds
    chosen = run.options.suite or (["quick"] if run.options.quick else ["prefill", "backward", "decode"])
    suites = {suite: cases(suite, dtypes) for suite in chosen}
    everything = [case for suite in suites.values() for case in suite]
    largest = check_all(everything, run)
    run.say(f"correct in all {len(everything)} cases: the largest error is {largest:.2f} of the allowed error")
    run.say(f"median of {rounds} rounds")
    for name, suite in suites.items():
        results = [measure(name, case, device, rounds) for case in run.track("measuring", suite, described)]
        path = run.write(
            f"throughput-{device}-{name}",
            [result.record(run.machine) for result in results],
            (row for result in results for row in result.rows(run.machine)),
        )
        if name not in ("masks", "models"):  # which have no axis to draw them over
            picture(results, str(run.machine), path)
        run.console.print(table(results))
        run.say(*closing(results))
        if left_out := len(dtypes) * len(SUITES[name]) - len(suite):
            run.say(f"left out: {left_out} shapes with over {KV_BYTES / 2**30:.0f} GiB of keys and values")
        run.wrote(path)


if __name__ == "__main__":
    main(sys.argv[1:])
