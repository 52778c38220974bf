"""python -m bench.throughput: time of attention beside every peer that is there, and beside what the machine can do."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .check import check
from .contenders import contenders
from .limits import limit
from .record import Machine, now, write_csv, write_json
from .report import UNITS, Result, closing, picture, table
from .shapes import SUITES, Shape
from .timing import interleaved

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_BYTES = 2**32
"""Shapes with more in keys and values are left out."""

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


def check_all(chosen: Sequence[Case], device: str, progress: Progress) -> float:
    """The largest error, as a share of what is allowed; stops where one is larger."""
    task = progress.add_task("checking", total=len(chosen))
    largest = 0.0
    for shape, dtype in chosen:
        progress.update(task, description=f"checking {dtype} {shape}")
        share = check(shape, shape.inputs(DTYPES[dtype], device))
        if not share <= 1:
            raise SystemExit(f"wrong: {dtype} {shape}: {share:.2f} x the error that is allowed")
        largest = max(largest, share)
        progress.advance(task)
    progress.remove_task(task)
    return largest


def measure_all(suite: str, chosen: Sequence[Case], device: str, rounds: int, progress: Progress) -> list[Result]:
    task = progress.add_task("measuring", total=len(chosen))
    results = []
    for case in chosen:
        progress.update(task, description=f"measuring {case[1]} {case[0]}")
        results.append(measure(suite, case, device, rounds))
        progress.advance(task)
    progress.remove_task(task)
    return results


def write(results: Sequence[Result], machine: Machine, command: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "command": command,
        "date": now(),
        "machine": asdict(machine),
        "results": [result.record(machine) for result in results],
    }
    write_json(path.with_suffix(".json"), record)
    write_csv(path.with_suffix(".csv"), (row for result in results for row in result.rows(machine)))
    picture(results, machine, path)


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argument's type: some of the known names, separated by commas."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(known)}, separated by commas")
        return chosen

    return parse


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.throughput", description=__doc__.partition(": ")[2])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--dtype", type=names(list(DTYPES)), default=list(DTYPES), help="float32,bfloat16,float16")
    parser.add_argument("--suite", type=names(list(SUITES)), default=["quick"], help=",".join(SUITES))
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for records and pictures")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--rounds", type=int, default=7, help="of which the median counts")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    command = shlex.join(["python", "-m", "bench.throughput", *argv])
    machine = Machine.here(options.device)
    console = Console(highlight=False)
    console.width = max(console.width, 140)  # of the table
    suites = {suite: cases(suite, options.dtype) for suite in options.suite}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console.print(f"{machine}; median of {options.rounds} rounds", markup=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        chosen = [case for suite in suites.values() for case in suite]
        largest = check_all(chosen, options.device, progress)
        console.print(f"correct in all {len(chosen)} cases: the largest error is {largest:.2f} of what is allowed")
        for suite, chosen in suites.items():
            left_out = len(options.dtype) * len(SUITES[suite]) - len(chosen)
            results = measure_all(suite, chosen, options.device, options.rounds, progress)
            path = options.out / f"throughput-{options.device}-{suite}"
            write(results, machine, command, path)
            console.print(table(results))
            console.print("\n".join(closing(results)), markup=False)
            if left_out:
                console.print(f"left out: {left_out} shapes with over {KV_BYTES / 2**30:.0f} GiB of keys and values")
            console.print(f"written: {path}.json, .csv, .png, .svg")


if __name__ == "__main__":
    main(sys.argv[1:])
