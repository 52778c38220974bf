"""Measures the error against float64 of ours, of every installed peer, and of two broken recurrences."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

from flashsoftmax import State, attention, merge

from .support import style
from .support.command import Run, markdown_table, parser, table
from .support.contenders import DEFAULT, OURS, contenders, naive
from .support.shapes import DTYPES, Inputs, Shape
from .support.tiled import tiled

QUERIES = 64
"""Enough queries for the tiled forward: fewer would be a decode."""
KEYS = 4096
PEAK = 10.0
"""How far the largest score stands above the others while its position is swept."""

Pair = tuple[Tensor, Tensor]
"""out and lse of a part of the keys."""


@dataclass(frozen=True)
class Sweep:
    name: str
    axis: str
    values: Sequence[float]
    quick: Sequence[float]


KEYS_SWEEP = Sweep("keys", "keys", (128, 512, 2048, 8192, 32768, 131072), (128, 2048, 8192))
DEVIATION = Sweep("deviation", "standard deviation of the scores", (1, 2, 5, 10, 20, 50, 100), (1, 10, 100))
POSITION = Sweep("position", "relative position of the largest score", (0, 0.25, 0.5, 0.75, 1), (0, 0.5, 1))
LEVEL = Sweep(
    "level",
    "mean of the scores",
    (-150, -125, -110, -105, -100, -95, -90, -85, -60, -30, 0, 30, 60, 90, 120, 150),
    (-150, -100, -60, 0, 150),
)
SPLITS = Sweep("splits", "splits of 65,536 keys", (1, 2, 4, 8, 16, 32, 64), (1, 8, 64))
ORDER = Sweep("order", "number of merged states", (2, 4, 8, 16, 32, 64, 128), (2, 16, 64))
INPUTS = (KEYS_SWEEP, DEVIATION, POSITION, LEVEL)
MERGES = (SPLITS, ORDER)


def shape_of(sweep: Sweep, x: float) -> Shape:
    if sweep is SPLITS:
        return Shape("decode", 1, 8, 2, 1, 65536, 64)
    return Shape("forward", 1, 2, 2, QUERIES, int(x) if sweep is KEYS_SWEEP else KEYS, 64)


def inputs_of(sweep: Sweep, x: float, shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    """Inputs whose scores are normal with deviation 1, changed as the sweep asks."""
    inputs = shape.inputs(torch.float32, device)
    query, key = inputs.query, inputs.key
    if sweep is DEVIATION:
        query *= x
    if sweep in (POSITION, LEVEL):  # makes the first element of a key an offset of the key's scores
        query[..., 0] = shape.dim**0.5
        key[..., 0] = x if sweep is LEVEL else 0
    if sweep is POSITION:
        key[:, :, round(x * (shape.keys - 1)), 0] = PEAK
    return Inputs(*(tensor.to(dtype) for tensor in inputs))


def recurrences(inputs: Inputs, shape: Shape) -> dict[str, Callable[[], Tensor]]:
    """The tiled recurrence, with each of two mistakes."""
    attend = partial(tiled, *inputs[:3], shape)
    return {"m from 0": partial(attend, first_m=0.0), "acc not rescaled": partial(attend, rescale_acc=False)}


def orders(pairs: Sequence[Pair], values: Sequence[Tensor]) -> dict[str, Callable[[], Tensor]]:
    """States of disjoint keys, merged in several orders. All but the last round every merge to the dtype."""

    def both(a: Pair, b: Pair) -> Pair:
        return merge([a[0], b[0]], [a[1], b[1]])

    def tree(of: Sequence[Pair]) -> Pair:
        return of[0] if len(of) == 1 else both(tree(of[: len(of) // 2]), tree(of[len(of) // 2 :]))

    def at_once(of: Sequence[Pair]) -> Tensor:
        return merge(*map(list, zip(*of, strict=True)))[0]

    def states() -> Tensor:
        made: State = reduce(State.merge, (State.from_lse(*pair) for pair in pairs))
        return made.output

    shuffled = [pairs[i] for i in torch.randperm(len(pairs)).tolist()]
    return {
        "at once": lambda: at_once(pairs),
        "at once, shuffled": lambda: at_once(shuffled),
        "tree of pairs": lambda: tree(pairs)[0],
        "one by one": lambda: reduce(both, pairs)[0],
        "one by one, backwards": lambda: reduce(both, reversed(pairs))[0],
        "State, one by one": states,
    }


def calls(sweep: Sweep, x: float, shape: Shape, inputs: Inputs, device: str) -> Iterator[tuple[str, Tensor]]:
    """The output of each contender."""
    query, key, value, _ = inputs
    if sweep is ORDER:
        chunks = list(zip(key.chunk(int(x), 2), value.chunk(int(x), 2), strict=True))
        pairs = [attention(query, k, v, return_lse=True) for k, v in chunks]
        yield from ((name, call()) for name, call in orders(pairs, [v for _, v in chunks]).items())
        return
    timed, _ = contenders(shape, inputs, device)
    if sweep is SPLITS:
        yield OURS, attention(query, key, value, split_size=shape.keys // int(x))
        timed.pop(OURS)
    else:
        yield from ((name, call()) for name, call in recurrences(inputs, shape).items())
    for name, contender in timed.items():
        with contender.within():
            yield name, contender.call()[0]  # type: ignore[index]


def measure(sweep: Sweep, x: float, dtype: str, device: str) -> Iterator[dict[str, Any]]:
    """The largest and the RMS error of each contender; None if its output is not finite."""
    shape = shape_of(sweep, x)
    inputs = inputs_of(sweep, x, shape, DTYPES[dtype], device)
    exact = naive(inputs.query.double(), inputs.key.double(), inputs.value.double(), shape)
    for name, out in calls(sweep, x, shape, inputs, device):
        error = out.double() - exact
        largest = float(error.abs().max() / exact.abs().max())
        rms = float((error.square().mean() / exact.square().mean()).sqrt())
        finite = math.isfinite(rms)
        yield {
            "sweep": sweep.name,
            "x": x,
            "dtype": dtype,
            "contender": name,
            "shape": str(shape),
            "largest": largest if finite else None,
            "rms": rms if finite else None,
        }


LOOKS: dict[str, tuple[str, str]] = {
    OURS: (style.OURS, "-"),
    DEFAULT: (style.PEER, "-"),
    "torch flash": (style.PEER, "--"),
    "torch cudnn": (style.PEER, ":"),
    "torch efficient": (style.PEER, "-."),
    "flash_attn": (style.LIMIT, "-"),
    "flashinfer": (style.LIMIT, "--"),
    "torch math": (style.MATH, "-"),
    "naive": (style.NAIVE, "-"),
    "m from 0": (style.WRONG, "--"),
    "acc not rescaled": (style.WORSE, "--"),
}
ORDER_LOOKS = {
    "at once": (style.OURS, "-"),
    "at once, shuffled": (style.OURS, ":"),
    "tree of pairs": (style.PEER, "-"),
    "one by one": (style.MATH, "-"),
    "one by one, backwards": (style.MATH, ":"),
    "State, one by one": (style.LIMIT, "--"),
}


def looks(sweep: Sweep) -> dict[str, tuple[str, str]]:
    return ORDER_LOOKS if sweep is ORDER else LOOKS


def worst(results: Sequence[Mapping[str, Any]], sweeps: Sequence[Sweep]) -> tuple[list[str], list[list[str]]]:
    """The largest error of each sweep: a header, and a row per sweep and dtype."""
    found: dict[tuple[str, str], dict[str, list[float | None]]] = {}
    for sweep in sweeps:
        for r in results:
            if r["sweep"] == sweep.name:
                found.setdefault((sweep.axis, r["dtype"]), {}).setdefault(r["contender"], []).append(r["largest"])
    names = [name for name in looks(sweeps[0]) if any(name in row for row in found.values())]

    def text(errors: Sequence[float | None]) -> str:
        return "NaN" if None in errors else f"{max(e for e in errors if e is not None):.1e}" if errors else ""

    return ["over", "dtype", *names], [[*key, *(text(row.get(n, [])) for n in names)] for key, row in found.items()]


def draw(axes: Axes, sweep: Sweep, results: Sequence[Mapping[str, Any]]) -> None:
    """Plots errors over the swept value, with a cross where the output is not finite."""
    highest = max((r["largest"] for r in results if r["largest"] is not None), default=1.0)
    unit = torch.finfo(DTYPES[results[0]["dtype"]]).eps / 2
    axes.axhline(unit, color=style.TEXT, linestyle=(0, (1, 2)), linewidth=1)
    for name, (color, dashes) in reversed(looks(sweep).items()):  # ours on top
        line = sorted((r for r in results if r["contender"] == name), key=lambda r: r["x"])
        finite = [(r["x"], max(r["largest"], 1e-9)) for r in line if r["largest"] is not None]
        if finite:
            axes.plot(*zip(*finite, strict=True), color=color, linestyle=dashes, marker="o", markersize=3.5)
        lost = [r["x"] for r in line if r["largest"] is None]
        axes.plot(lost, [3 * highest] * len(lost), color=color, linestyle="none", marker="x", markersize=6)
    axes.set_yscale("log")
    if sweep in (KEYS_SWEEP, DEVIATION, SPLITS, ORDER):
        style.powers(axes, {r["x"] for r in results})
    axes.margins(x=0.06)
    axes.set_xlabel(sweep.axis)


def picture(sweeps: Sequence[Sweep], results: Sequence[Mapping[str, Any]], machine: str, path: Path) -> None:
    """A row of panels per sweep, a column per dtype."""
    dtypes = list(dict.fromkeys(r["dtype"] for r in results))
    caption = f"largest error as a share of the largest value; dotted: half a rounding unit; x: NaN. {machine}"
    with style.picture(path, len(sweeps), len(dtypes), caption) as (_, grid):
        shown: dict[str, tuple[str, str]] = {}
        for row, sweep in zip(grid, sweeps, strict=True):
            chosen = [r for r in results if r["sweep"] == sweep.name]
            for axes, dtype in zip(row, dtypes, strict=True):
                draw(axes, sweep, [r for r in chosen if r["dtype"] == dtype])
                axes.set_title(dtype, loc="left")
            row[0].set_ylabel("error against float64")
            there = {r["contender"] for r in chosen}
            legend = {name: look for name, look in looks(sweep).items() if name in there}
            if legend != shown:
                style.legend(row[-1], legend)
            shown = legend


def page(record: Mapping[str, Any]) -> Iterator[str]:
    """The part of docs/results.md about accuracy."""
    yield from markdown_table(*worst(record["results"], (*INPUTS, SPLITS)), left=2)
    yield ""
    yield from markdown_table(*worst(record["results"], (ORDER,)), left=2)


def main(argv: Sequence[str]) -> None:
    run = Run.start(parser("accuracy"), argv)
    device = run.options.device
    points = [
        (sweep, x, dtype)
        for sweep in (*INPUTS, *MERGES)
        for dtype in run.options.dtype
        for x in (sweep.quick if run.options.quick else sweep.values)
    ]
    results = [
        result
        for point in run.track("comparing", points, lambda point: f"{point[2]}, {point[0].name} {point[1]}")
        for result in measure(*point, device)
    ]
    path = run.write(f"accuracy-{device}", results)
    merges = path.with_name(f"{path.name}-merge")
    picture(INPUTS, results, str(run.machine), path)
    picture(MERGES, results, str(run.machine), merges)
    run.say("the largest error of each sweep, as a share of the largest value")
    run.console.print(table(*worst(results, (*INPUTS, SPLITS)), left=2))
    run.console.print(table(*worst(results, (ORDER,)), left=2))
    run.wrote(path, merges)


if __name__ == "__main__":
    main(sys.argv[1:])
