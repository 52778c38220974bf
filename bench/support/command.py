"""What the commands have in common: options, progress, tables, and files that record their origin."""

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

from .. import COMMANDS
from .record import Machine, now, write_csv, write_json
from .shapes import DTYPES

T = TypeVar("T")


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes some of the known names, separated by commas."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: give some of {', '.join(known)}, separated by commas")
        return chosen

    return parse


def parser(name: str) -> argparse.ArgumentParser:
    """The options that the commands share."""
    made = argparse.ArgumentParser(prog=f"python -m bench {name}", description=COMMANDS[name])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", choices=("cpu", "cuda"), default=device, help="default here: %(default)s")
    made.add_argument("--dtype", type=names(list(DTYPES)), default=list(DTYPES), help=f"some of {','.join(DTYPES)}")
    made.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    made.add_argument(
        "--out", type=Path, default=Path("build/bench"), help="folder of records and pictures; default: %(default)s"
    )
    made.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="CPU threads; default here: %(default)s"
    )
    return made


@dataclass(frozen=True)
class Run:
    """One run of a command."""

    options: argparse.Namespace
    machine: Machine
    command: str
    console: Console

    @classmethod
    def start(cls, parser: argparse.ArgumentParser, argv: Sequence[str]) -> Run:
        options = parser.parse_args(argv)
        torch.set_num_threads(options.threads)
        console = Console(highlight=False, file=sys.stdout)
        console.width = max(console.width, 140)  # the tables need it
        run = cls(options, Machine.here(options.device), shlex.join([*parser.prog.split(), *argv]), console)
        run.say(str(run.machine))
        return run

    def say(self, *lines: str) -> None:
        for line in lines:
            self.console.print(line, markup=False)

    def track(self, verb: str, items: Sequence[T], describe: Callable[[T], str] = str) -> Iterator[T]:
        """Yields the items, and shows a progress bar."""
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
        """Writes the results to stem.json, and the rows (by default the results) to stem.csv."""
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
    """Three significant digits."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def size(count: float) -> str:
    """A number of bytes, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{number(count)} {unit}"
        count /= 1024
    return f"{number(count)} TiB"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """A table for the terminal; the first `left` columns are text, the others numbers."""
    made = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for index, name in enumerate(header):
        made.add_column(name, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Iterator[str]:
    """The same table in Markdown."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'|'.join(' --- ' if i < left else ' ---: ' for i in range(len(header)))}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
