"""What the commands have in common: options, progress, tables, and files that say where they come from."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import BENCHMARKS
from .record import Machine, now, write_csv, write_json
from .shapes import DTYPES

T = TypeVar("T")


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argument's type: some of the known names, separated by commas."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(known)}, separated by commas")
        return chosen

    return parse


def parser(name: str) -> argparse.ArgumentParser:
    """Of a benchmark, with the options that all take."""
    made = argparse.ArgumentParser(prog=f"python -m bench {name}", description=BENCHMARKS[name])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", choices=("cpu", "cuda"), default=device)
    made.add_argument("--dtype", type=names(list(DTYPES)), default=list(DTYPES), help=",".join(DTYPES))
    made.add_argument("--quick", action="store_true", help="small and short")
    made.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for records and pictures")
    made.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    return made


@dataclass(frozen=True)
class Run:
    """One run of a benchmark."""

    options: argparse.Namespace
    machine: Machine
    command: str
    console: Console

    @classmethod
    def start(cls, parser: argparse.ArgumentParser, argv: Sequence[str]) -> Run:
        options = parser.parse_args(argv)
        torch.set_num_threads(options.threads)
        console = Console(highlight=False, file=sys.stdout)
        console.width = max(console.width, 140)  # of the tables
        run = cls(options, Machine.here(options.device), shlex.join([*parser.prog.split(), *argv]), console)
        run.say(str(run.machine))
        return run

    def say(self, *lines: str) -> None:
        for line in lines:
            self.console.print(line, markup=False)

    def track(self, verb: str, items: Sequence[T], describe: Callable[[T], str] = str) -> Iterator[T]:
        """The items, under a progress bar."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        silent = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=silent) as progress:
            task = progress.add_task(verb, total=len(items))
            for item in items:
                progress.update(task, description=f"{verb} {describe(item)}")
                yield item
                progress.advance(task)

    def write(
        self, stem: str, results: Sequence[Mapping[str, object]], rows: Iterable[Mapping[str, object]] | None = None
    ) -> Path:
        """stem.json, and stem.csv of the rows, which are the results where none are given."""
        path: Path = self.options.out / stem
        path.parent.mkdir(parents=True, exist_ok=True)
        origin = {"command": self.command, "date": now(), "machine": asdict(self.machine)}
        write_json(path.with_suffix(".json"), {**origin, "results": results})
        write_csv(path.with_suffix(".csv"), results if rows is None else rows)
        return path

    def wrote(self, *paths: Path) -> None:
        for path in paths:
            kinds = [kind for kind in (".json", ".csv", ".png", ".svg") if path.with_suffix(kind).exists()]
            self.say(f"written: {path}{', '.join(kinds)}")


def number(x: float) -> str:
    """Three digits."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def size(count: float) -> str:
    """Of bytes, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{number(count)} {unit}"
        count /= 1024
    return f"{number(count)} TiB"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """For the terminal; the first `left` columns are of text."""
    made = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for index, name in enumerate(header):
        made.add_column(name, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Iterator[str]:
    """The same for a page."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'|'.join(' --- ' if i < left else ' ---: ' for i in range(len(header)))}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
