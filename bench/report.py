"""Writes docs/results.md from the latest results: reads the records in a folder, and writes FOLDER.md beside it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import accuracy, scaling, traffic
from .support import throughput_result
from .support.command import Run, parser

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A part of the page, for the records whose file names begin with `begin`."""

    begin: str
    title: str
    note: str
    page: Callable[[Record], Iterator[str]]


PARTS = (
    Part(
        "throughput",
        "Throughput, measured",
        "Medians over rounds. Each round times every contender once, in random order.",
        throughput_result.page,
    ),
    Part(
        "traffic-model",
        "Traffic, predicted",
        "Bytes per call, by the formulas of [traffic_model.py](../bench/support/traffic_model.py). Every byte counts "
        'once per kernel. "Asked" is the sum over what all threads ask for; caches serve most of it. The floor is a '
        "time: the larger of bytes / bandwidth and FLOP / peak, added up over the kernels.",
        traffic.model_page,
    ),
    Part(
        "traffic-roofs",
        "Machines, as the predictions assume them",
        "GPUs by their data sheets, without sparsity. The CPU was measured.",
        traffic.roofs_page,
    ),
    Part(
        "traffic-counted",
        "Traffic, counted",
        "An interpreter on the CPU executes the PTX of the CUDA kernels, and counts what the threads read and write.",
        traffic.counted_page,
    ),
    Part("traffic-cpu-measured", "Memory, measured", "Memory of a call beyond its inputs.", traffic.measured_page),
    Part(
        "traffic-cuda-measured",
        "Memory and DRAM, measured",
        "Bytes of a call beyond its inputs.",
        traffic.measured_page,
    ),
    Part(
        "scaling-model",
        "Sequence-parallel attention, predicted",
        "A model: no GPU has run this. Forward + backward of one sequence in bfloat16, 32 heads on 8, dim 128, split "
        "over ranks; with a window the layout is contiguous, otherwise zigzag. What each rank sends and computes per "
        "step is that of `flashsoftmax.distributed` ([scaling_model.py](../bench/support/scaling_model.py)); a test "
        "compares it with the bytes that ranks on CPUs send. A step takes as long as its arithmetic at the H200's peak "
        "or as its messages, whichever is longer; the exchanges of Ulysses overlap with nothing. Left out: memory, "
        "kernels below the peak, launches, and messages that share a switch. Links: NVLink between all ranks (an H200 "
        "server has 8); or NVLink within 8, and InfiniBand between. Bytes: what the busiest rank sends or receives on "
        "the slowest link in use.",
        scaling.page,
    ),
    Part(
        "accuracy",
        "Accuracy, measured",
        "The largest error against float64, as a share of the largest value, over each sweep. "
        '"m from 0" and "acc not rescaled" are mistakes that the recurrence avoids: [recurrence.md](recurrence.md).',
        accuracy.page,
    ),
)


def where(machine: Record) -> str:
    processor = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads, {machine['instructions']}"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{processor}; {machine['system']}; {versions}; commit {machine['commit']}"


def section(part: Part, path: Path) -> Iterator[str]:
    record = json.loads(path.read_text())
    about = path.stem.removeprefix(part.begin).strip("-").replace("-", ", ")
    yield f"## {part.title}{': ' + about if about else ''}\n"
    yield f"{part.note}\n"
    yield f"{record['date']}, `{record['command']}` on {where(record['machine'])}.\n"
    for picture in (path.with_suffix(".svg"), path.with_name(f"{path.stem}-merge.svg")):
        if picture.exists():
            yield f"![{part.title}]({path.parent.name}/{picture.name})\n"
    yield from part.page(record)
    yield ""


def report(folder: Path) -> str:
    lines = [
        "# Results\n",
        f"Written by `python -m bench report` from the records in [{folder.name}]({folder.name}). "
        "Each title says whether the figures were predicted, counted or measured. The text below it says when, by "
        "which command and on which machine.\n",
    ]
    for part in PARTS:
        for path in sorted(folder.glob(f"{part.begin}*.json")):
            lines += section(part, path)
    return "\n".join(lines).rstrip() + "\n"


def main(argv: Sequence[str]) -> None:
    options = parser("report")
    options.set_defaults(out=Path("docs/results"))
    run = Run.start(options, argv)
    path = run.options.out.with_suffix(".md")
    path.write_text(report(run.options.out))
    run.say(f"written: {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
