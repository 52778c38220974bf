"""Predicts the time of attention over 2 to 1,024 ranks, by ring, gather and Ulysses."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from flashsoftmax.distributed.layout import UNBOUNDED, Band, Layout

from .support import style
from .support.command import Run, markdown_table, number, parser, size, table
from .support.roofs import GPUS, INFINIBAND, NVLINK
from .support.scaling_model import Fabric, Work, flops, is_routed, seconds, steps

RANKS = tuple(2**x for x in range(1, 11))
TOKENS = tuple(2**x for x in range(13, 24, 2))
WINDOW = 4095
HEADS, HEADS_KV, DIM = 32, 8, 128
NAMES = ("forward", "backward")
NODE = 8
FABRICS = (Fabric("NVLink", RANKS[-1]), Fabric("InfiniBand", NODE))
"""All ranks in one NVLink domain; nodes of 8 GPUs, and InfiniBand between them."""
CASES = {"causal": Band(UNBOUNDED, 0), f"window {WINDOW + 1:,}": Band(WINDOW, 0)}
LAYOUTS = dict(zip(CASES, ("zigzag", "contiguous"), strict=True))
PAIR = f"Ulysses {NODE} x ring"
COLORS = {"ring": style.OURS, "gather": style.PEER, "Ulysses": style.LIMIT, PAIR: style.MATH}
CLOSE = 1.05
"""A method within this factor of the fastest is marked too."""
H200 = next(gpu for gpu in GPUS if gpu.name == "H200")


def works(case: str, tokens: int, ranks: int) -> Iterator[tuple[str, Work]]:
    """The methods that this many ranks can use."""

    def work(holders: int, ulysses: int, gather: bool = False) -> Work:
        layout = Layout((tokens,), holders, "zigzag" if LAYOUTS[case] == "zigzag" else "contiguous")
        return Work(layout, CASES[case], HEADS, HEADS_KV, DIM, torch.bfloat16, ulysses=ulysses, gather=gather)

    yield "ring", work(ranks, 1)
    yield "gather", work(ranks, 1, gather=True)
    if ranks <= HEADS:
        yield "Ulysses", work(1, ranks)
    if ranks > NODE:
        yield PAIR, work(ranks // NODE, NODE)


def predicted(case: str, fabric: Fabric, tokens: int, ranks: int) -> Iterator[dict[str, Any]]:
    # What one rank would compute alone; each of `ranks` at the peak would take `ideal` seconds.
    alone = Work(Layout((tokens,), 1), CASES[case], HEADS, HEADS_KV, DIM, torch.bfloat16)
    useful = [flops(alone, sum(s.pairs for s in steps(alone, 1, b)), b) for b in (False, True)]
    ideal = [x / ranks / H200.peak["bfloat16"] for x in useful]
    for method, work in works(case, tokens, ranks):
        both = [list(steps(work, fabric.node, backward)) for backward in (False, True)]
        times = [
            sum(seconds(work, s, b, fabric, H200) for s in side) for b, side in zip((False, True), both, strict=True)
        ]
        yield {
            "case": case,
            "layout": work.layout.name,
            "fabric": fabric.name,
            "tokens": tokens,
            "ranks": ranks,
            "method": method,
            "by": "routes" if is_routed(work) else "formula",
            **{f"exchanges, {name}": sum(s.sent > 0 for s in side) for name, side in zip(NAMES, both, strict=True)},
            **{f"bytes, {name}": sum(s.sent for s in side) for name, side in zip(NAMES, both, strict=True)},
            "flops, forward": flops(work, sum(s.pairs for s in both[0]), False),
            "flops, backward": flops(work, sum(s.pairs for s in both[1]), True),
            "forward, s": times[0],
            "forward + backward, s": sum(times),
            "share of peak, forward": ideal[0] / times[0],
            "share of peak": sum(ideal) / sum(times),
        }


def model(run: Run) -> list[dict[str, Any]]:
    tokens = TOKENS[::2] if run.options.quick else TOKENS
    ranks = RANKS[::3] if run.options.quick else RANKS
    cases = list(product(CASES, FABRICS, tokens, ranks))
    tracked = run.track("predicting", cases, lambda x: f"{x[0]}, {x[1].name}, {x[2]:,} tokens, {x[3]} ranks")
    return [result for case in tracked for result in predicted(*case)]


def grouped(results: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], dict[str, Mapping[str, Any]]]:
    """The methods of each (case, fabric, tokens, ranks)."""
    found: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for r in results:
        found.setdefault((r["case"], r["fabric"], r["tokens"], r["ranks"]), {})[r["method"]] = r
    return found


def fastest(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """Of methods that take the same time, the first."""
    return min(methods, key=lambda name: methods[name]["forward + backward, s"])


def rows(
    results: Sequence[Mapping[str, Any]], ranks: Sequence[int], tokens: Sequence[int]
) -> tuple[list[str], list[list[str]]]:
    """A row per (case, fabric, tokens, ranks), a column per method."""
    header = ["predicted", "links", "tokens", "ranks", *COLORS, "fastest", "share of peak"]
    header += ["bytes, ring", "bytes, gather", "bytes, Ulysses", f"bytes, {PAIR}"]
    made = []
    for (case, fabric, length, count), methods in grouped(results).items():
        if count not in ranks or length not in tokens:
            continue
        best = fastest(methods)
        times = [duration(methods[m]["forward + backward, s"]) if m in methods else "" for m in COLORS]
        moved = [
            size(methods[m]["bytes, forward"] + methods[m]["bytes, backward"]) if m in methods else "" for m in COLORS
        ]
        share = f"{methods[best]['share of peak']:.0%}"
        made.append([case, fabric, style.short(length), f"{count:,}", *times, best, share, *moved])
    return header, made


def duration(time: float) -> str:
    return f"{number(time)} s" if time >= 1 else f"{number(time * 1e3)} ms"


def draw_times(axes: Axes, results: Sequence[Mapping[str, Any]], tokens: int) -> None:
    """The time of each method over the ranks, and of the arithmetic alone."""
    line = [r for r in results if r["tokens"] == tokens and r["method"] == "ring"]
    alone = [r["share of peak"] * r["forward + backward, s"] for r in line]
    axes.plot([r["ranks"] for r in line], alone, color=style.TEXT, linestyle=(0, (1, 1.5)), linewidth=1.2)
    for method, color in reversed(COLORS.items()):
        line = [r for r in results if r["tokens"] == tokens and r["method"] == method]
        axes.plot([r["ranks"] for r in line], [r["forward + backward, s"] for r in line], color=color, marker="o")
    style.powers(axes, {r["ranks"] for r in results})
    axes.set_yscale("log", base=10)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: duration(x)))
    axes.yaxis.set_minor_locator(NullLocator())


def draw_fastest(axes: Axes, results: Sequence[Mapping[str, Any]]) -> None:
    """The fastest method over ranks and tokens, and the share of the peak that it leaves to arithmetic."""
    ranks, tokens = (sorted({r[name] for r in results}) for name in ("ranks", "tokens"))
    for (_, _, length, count), methods in grouped(results).items():
        best = fastest(methods)
        x, y = ranks.index(count), tokens.index(length)
        axes.add_patch(style.square(x, y, COLORS[best]))
        best_time = methods[best]["forward + backward, s"]
        close = [m for m, r in methods.items() if m != best and r["forward + backward, s"] <= CLOSE * best_time]
        for n, method in enumerate(close):
            axes.plot([x - 0.32 + 0.22 * n], [y + 0.3], color=COLORS[method], marker="s", markersize=4)
            axes.plot([x - 0.32 + 0.22 * n], [y + 0.3], color="white", marker="s", markersize=5.5, zorder=1.5)
        text = f"{100 * methods[best]['share of peak']:.0f}"
        axes.text(x, y - 0.08, text, ha="center", va="center", fontsize=8, color="white", weight="bold")
    axes.set_xlim(-0.5, len(ranks) - 0.5)
    axes.set_ylim(-0.5, len(tokens) - 0.5)
    axes.set_xticks(range(len(ranks)), [f"{r:,}" for r in ranks])
    axes.set_yticks(range(len(tokens)), [style.short(t) for t in tokens])
    axes.grid(False)


def picture(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    tokens = sorted({r["tokens"] for r in results})[-2]
    caption = (
        f"Predicted, not run: H200, forward + backward, bfloat16, {HEADS} heads on {HEADS_KV}, dim {DIM}. Numbers: "
        f"percent of the GPUs' peak. Small squares: within {CLOSE - 1:.0%} of the fastest"
    )
    titles = {"NVLink": "fastest, one NVLink domain", "InfiniBand": f"fastest, InfiniBand between nodes of {NODE}"}
    with style.picture(path, len(CASES), 3, caption, size=(4.3, 2.7)) as (figure, grid):
        for line, case in zip(grid, CASES, strict=True):
            here = [r for r in results if r["case"] == case]
            draw_times(line[0], [r for r in here if r["fabric"] == "InfiniBand"], tokens)
            line[0].set_title(f"{case}: time of {style.short(tokens)} tokens, InfiniBand", loc="left")
            for axes, (fabric, title) in zip(line[1:], titles.items(), strict=True):
                draw_fastest(axes, [r for r in here if r["fabric"] == fabric])
                axes.set_title(f"{case}: {title}", loc="left")
                axes.set_ylabel("tokens")
            for axes in line:
                axes.set_xlabel("ranks")
        looks: dict[str, tuple[str, Any]] = {name: (color, "-") for name, color in COLORS.items()}
        style.legend(figure, {**looks, "arithmetic alone": (style.TEXT, (0, (1, 1.5)))})


def link_lines() -> Iterator[str]:
    for link in (NVLINK, INFINIBAND):
        rate = f"{number(link.bandwidth / 1e9)} GB/s each way, {number(link.latency * 1e6)} us per exchange"
        yield f"{link.name}: {rate} ({link.source})"
    yield f"{H200.name}: {number(H200.peak['bfloat16'] / 1e12)} TFLOP/s in bfloat16 ({H200.source})"


def page(record: Mapping[str, Any]) -> Iterator[str]:
    """A part of docs/results.md."""
    yield from markdown_table(*rows(record["results"], (2, 8, 32, 128, 1024), (2**17, 2**21)), left=2)
    yield ""
    yield from (f"- {line}" for line in link_lines())


def main(argv: Sequence[str]) -> None:
    run = Run.start(parser("scaling"), argv)
    run.say(*link_lines())
    results = model(run)
    path = run.write("scaling-model", results)
    picture(results, path)
    run.console.width = 220
    run.console.print(table(*rows(results, RANKS[::3], TOKENS[::2]), left=2))
    run.wrote(path)


if __name__ == "__main__":
    main(sys.argv[1:])
