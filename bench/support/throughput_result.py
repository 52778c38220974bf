"""Shows throughput as a table, as records, as a picture and as a part of docs/results.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from rich import box
from rich.table import Table

from . import style
from .command import markdown_table, number
from .contenders import DEFAULT, OURS
from .record import Machine
from .shapes import Shape

UNITS = {"GB/s": 1e9, "GFLOP/s": 1e9, "TFLOP/s": 1e12}


@dataclass(frozen=True)
class Result:
    """Seconds per call in each round, for ours and each peer, of one shape in one dtype."""

    suite: str
    shape: Shape
    dtype: str
    work: float
    """FLOPs, or bytes of keys and values."""
    unit: str
    seconds: dict[str, list[float]]
    limit: str
    limit_rounds: list[float]
    """The measured limit in each round, in `unit`."""
    missing: dict[str, str]
    """Peers that were not timed, each with the reason."""

    def rates(self, name: str) -> list[float]:
        """Throughput in each round, in `unit`."""
        return [self.work / seconds / UNITS[self.unit] for seconds in self.seconds[name]]

    def rate(self, name: str) -> float:
        return median(self.rates(name))

    @property
    def best_peer(self) -> str:
        return max((name for name in self.seconds if name != OURS), key=self.rate)

    def ratio(self, peer: str) -> float:
        return self.rate(OURS) / self.rate(peer)

    @property
    def share(self) -> float:
        """Our share of the limit, of which the best round counts."""
        return self.rate(OURS) / max(self.limit_rounds)

    def record(self, machine: Machine) -> dict[str, object]:
        medians = {name: median(seconds) for name, seconds in self.seconds.items()}
        summary = {
            "medians": medians,
            "rate": self.rate(OURS),
            "share_of_limit": self.share,
            "best_peer": self.best_peer,
            "ratio_to_best_peer": self.ratio(self.best_peer),
            "ratio_to_torch": self.ratio(DEFAULT),
        }
        return {"machine": str(machine), **asdict(self), **summary}

    def rows(self, machine: Machine) -> Iterator[dict[str, object]]:
        """A row per contender and round; the limit is one of the contenders."""
        shape = {"machine": str(machine), "suite": self.suite, "dtype": self.dtype, **asdict(self.shape)}
        for name, seconds in self.seconds.items():
            for i, (time, rate) in enumerate(zip(seconds, self.rates(name), strict=True)):
                yield {
                    **shape,
                    "contender": name,
                    "round": i,
                    "seconds": time,
                    "rate": rate,
                    "unit": self.unit,
                }
        for i, rate in enumerate(self.limit_rounds):
            yield {
                **shape,
                "contender": self.limit,
                "round": i,
                "seconds": "",
                "rate": rate,
                "unit": self.unit,
            }


def ratio_text(ratio: float) -> str:
    return f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}x[/]"


def table(results: Sequence[Result]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for header in ("dtype", "kind", "mask"):
        made.add_column(header, no_wrap=True)
    shape = ("batch", "heads\nq/kv", "queries\nx keys", "dim")
    for header in (*shape, "ms", "rate", "of the\nlimit", "torch's\nms", "over\ntorch"):
        made.add_column(header, justify="right", no_wrap=True)
    made.add_column("best\npeer", no_wrap=True)
    made.add_column("over\nit", justify="right", no_wrap=True)
    for group in by_dtype(results).values():
        for result in group:
            made.add_row(*table_row(result))
        made.add_section()
    return made


def table_row(result: Result) -> list[str]:
    shape = result.shape
    return [
        result.dtype,
        f"{shape.model}: {shape.kind}" if shape.model else shape.kind,
        shape.shown,
        f"{shape.batch}",
        f"{shape.heads}/{shape.heads_kv}",
        f"{shape.queries} x {shape.keys}",
        f"{shape.dim}",
        number(median(result.seconds[OURS]) * 1e3),
        f"{number(result.rate(OURS))} {result.unit}",
        f"{result.share:.0%}",
        number(median(result.seconds[DEFAULT]) * 1e3),
        ratio_text(result.ratio(DEFAULT)),
        result.best_peer,
        ratio_text(result.ratio(result.best_peer)),
    ]


def by_dtype(results: Iterable[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.dtype, []).append(result)
    return groups


def closing(results: Sequence[Result]) -> Iterator[str]:
    """A line per dtype, then the limits, and what was not timed and why."""
    for dtype, group in by_dtype(results).items():
        torchs = [result.ratio(DEFAULT) for result in group]
        best = [result.ratio(result.best_peer) for result in group]
        yield (
            f"{dtype}: {median(torchs):.2f} x torch (worst {min(torchs):.2f}), "
            f"{median(best):.2f} x the best peer (worst {min(best):.2f}), "
            f"{median(result.share for result in group):.0%} of the limit; medians over {len(group)} shapes"
        )
    limits: dict[tuple[str, str], list[float]] = {}
    for result in results:
        limits.setdefault((result.limit, result.unit), []).extend(result.limit_rounds)
    for (name, unit), rounds in limits.items():
        yield f"limit: {name}, {number(min(rounds))} to {number(max(rounds))} {unit} (median {number(median(rounds))})"
    missing: dict[tuple[str, str], int] = {}
    for result in results:
        for peer in result.missing.items():
            missing[peer] = missing.get(peer, 0) + 1
    for (name, reason), count in missing.items():
        yield f"not timed: {name}, {count} of {len(results)} shapes: {reason}"


def column(shape: Shape) -> str:
    """The column of the picture that shows the shape."""
    if shape.kind == "decode":
        return f"decode, {shape.heads} heads on {shape.heads_kv}"
    return f"{shape.kind}, head dim {shape.dim}"


def variant(shape: Shape) -> str:
    """What tells the lines of a panel apart."""
    return f"batch {shape.batch}" if shape.kind == "decode" else "causal" if shape.causal else "full"


def dash(shape: Shape) -> tuple[float, Sequence[float]]:
    return (0, (4, 1.5)) if shape.causal or shape.batch > 1 else (0, ())


def draw(axes: Axes, results: Sequence[Result]) -> None:
    """Plots the throughput of ours, of torch and of the limit over the number of keys."""
    for name in dict.fromkeys(variant(result.shape) for result in results):
        line = sorted((r for r in results if variant(r.shape) == name), key=lambda r: r.shape.keys)
        keys, dashes = [result.shape.keys for result in line], dash(line[0].shape)
        limits = [max(result.limit_rounds) for result in line]
        axes.plot(keys, limits, color=style.LIMIT, linestyle=dashes, linewidth=1.2, marker="_")
        for contender, color in ((DEFAULT, style.PEER), (OURS, style.OURS)):
            rates = [result.rate(contender) for result in line]
            axes.plot(keys, rates, color=color, linestyle=dashes, marker="o")
    style.powers(axes, (result.shape.keys for result in results))
    axes.margins(x=0.08)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(results[0].unit)


def looks(results: Sequence[Result]) -> dict[str, tuple[str, Any]]:
    """The legend."""
    variants = {variant(result.shape): dash(result.shape) for result in results}
    contenders: dict[str, tuple[str, Any]] = {OURS: (style.OURS, "-"), "torch": (style.PEER, "-")}
    contenders["limit, measured"] = (style.LIMIT, "-")
    return contenders | {name: (style.TEXT, dashes) for name, dashes in variants.items()}


def picture(results: Sequence[Result], machine: str, path: Path) -> None:
    """A row of panels per dtype; a column per head dimension or, for decode, per number of key heads."""
    dtypes = list(by_dtype(results))
    columns = list(dict.fromkeys(column(result.shape) for result in results))
    with style.picture(path, len(dtypes), len(columns), machine) as (figure, grid):
        for row, dtype in zip(grid, dtypes, strict=True):
            for axes, name in zip(row, columns, strict=True):
                draw(axes, [r for r in results if r.dtype == dtype and column(r.shape) == name])
                axes.set_title(f"{dtype}, {name}", loc="left")
        for axes in grid[-1]:
            axes.set_xlabel("keys")
        style.legend(figure, looks(results))


def from_record(record: Mapping[str, Any]) -> Result:
    known = {field.name: record[field.name] for field in fields(Result)}
    return Result(**{**known, "shape": Shape(**record["shape"])})


def page(record: Mapping[str, Any]) -> Iterator[str]:
    """The part of docs/results.md about throughput: the table, then the closing lines."""
    results = [from_record(result) for result in record["results"]]
    header = ["dtype", "kind", "mask", "batch", "heads q/kv", "queries x keys", "dim", "ms", "rate", "of the limit"]
    header += ["torch's ms", "over torch", "best peer", "over it"]
    rows = ([re.sub(r"\[/?[a-z]*\]", "", cell) for cell in table_row(result)] for result in results)
    yield from markdown_table(header, rows, left=3)
    yield ""
    yield from (f"- {line}" for line in closing(results))
