"""Draws the picture of docs/sequence-parallel.md, from a real plan."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

from matplotlib.axes import Axes

from flashsoftmax.distributed.layout import UNBOUNDED, Band, Layout
from flashsoftmax.distributed.routes import Hop, gradient_hops, key_hops

from .support import style
from .support.command import Run, parser

RANKS = 4
LAYOUT = Layout((16 * RANKS,), RANKS)
CAUSAL = Band(UNBOUNDED, 0)
COLORS = (style.OURS, style.PEER, style.LIMIT, style.MATH)
"""Of each rank, and of the rows that it holds."""


def chunks(rank: int, start: int, end: int) -> list[int]:
    """The chunks of [start, end). A rank holds a head and a tail; those of the last rank touch."""
    size = LAYOUT.lengths[0] // LAYOUT.chunks
    return [c for c in (rank, LAYOUT.chunks - 1 - rank) if start <= c * size < end]


def draw_pairs(axes: Axes) -> None:
    """The rank and the step that each pair of chunks of queries and keys is computed by."""
    holder = {
        c: rank for rank, segments in enumerate(LAYOUT.segments) for s in segments for c in chunks(rank, s.start, s.end)
    }
    for query, key in product(range(LAYOUT.chunks), repeat=2):
        if key <= query:
            axes.add_patch(style.square(key, query, COLORS[holder[query]]))
            number(axes, key, query, (holder[query] - holder[key]) % RANKS)
    axes.set_title("the step at which pairs are computed", loc="left")
    axes.set_xlabel("chunk of keys")
    axes.set_ylabel("chunk of queries")
    axes.set_xlim(-0.5, LAYOUT.chunks - 0.5)
    axes.set_ylim(LAYOUT.chunks - 0.5, -0.5)
    axes.set_aspect("equal")


def number(axes: Axes, x: float, y: float, n: int) -> None:
    axes.text(x, y, f"{n}", ha="center", va="center", fontsize=8, color="white", weight="bold")


def draw_rows(axes: Axes, rank: int, column: int, owner: int, held: Iterable[int]) -> None:
    """A square per chunk that is on a rank in a column; the head to the left, the tail to the right."""
    for chunk in held:
        x = column + (-0.11 if chunk < RANKS else 0.11)
        axes.plot([x], [rank], marker="s", markersize=13, color=COLORS[owner])
        number(axes, x, rank, chunk)


def draw_hops(axes: Axes, hops: Iterable[Hop], behind: int) -> None:
    """Arrows, and what arrives. A hop of step t ends in column t + 1 - behind."""
    for h in hops:
        column = h.step + 1 - behind
        both = len(chunks(h.owner, h.start, h.end)) == 2
        shift = 0 if both else -0.06 if chunks(h.owner, h.start, h.end)[0] < RANKS else 0.06
        ends = (column - 0.77, h.sender + shift), (column - 0.24, h.receiver + shift)
        arrow = {
            "arrowstyle": "-|>",
            "color": COLORS[h.owner],
            "linewidth": 2.4 if both else 1.2,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        axes.annotate("", ends[1], ends[0], arrowprops=arrow)
        draw_rows(axes, h.receiver, column, h.owner, chunks(h.owner, h.start, h.end))


def frame(axes: Axes, title: str, columns: Sequence[str]) -> None:
    axes.set_title(title, loc="left")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(RANKS), [f"rank {r}" for r in range(RANKS)])
    for label, color in zip(axes.get_yticklabels(), COLORS, strict=True):
        label.set_color(color)
        label.set_fontweight("bold")
    axes.set_xlim(-0.4, len(columns) - 0.6)
    axes.set_ylim(RANKS - 0.6, -0.4)
    axes.grid(False)


def ring(path: Path) -> None:
    """Four ranks, causal: who computes, and who sends what when."""
    caption = (
        "Four ranks, zigzag, causal. Colours: the rank that holds the rows. Numbers in squares on the right: chunks"
    )
    with style.picture(path, 1, 3, caption, size=(4.2, 3.3)) as (_, ((pairs, keys, gradients),)):
        draw_pairs(pairs)
        pairs.grid(False)
        for rank, segments in enumerate(LAYOUT.segments):
            for s in segments:
                draw_rows(keys, rank, 0, rank, chunks(rank, s.start, s.end))
        draw_hops(keys, key_hops(LAYOUT, CAUSAL, gather=False), behind=0)
        frame(keys, "keys and values that ranks use at each step", [f"step {t}" for t in range(RANKS)])
        for h in key_hops(LAYOUT, CAUSAL, gather=False):
            draw_rows(gradients, h.receiver, h.step, h.owner, chunks(h.owner, h.start, h.end))
        draw_hops(gradients, gradient_hops(LAYOUT, CAUSAL, gather=False), behind=2)
        frame(gradients, "their gradients, one step behind", [*(f"step {t}" for t in range(1, RANKS)), "home"])


def main(argv: Sequence[str]) -> None:
    run = Run.start(parser("sharding"), argv)
    run.options.out.mkdir(parents=True, exist_ok=True)
    path = run.options.out / "sharding-ring"
    ring(path)
    run.wrote(path)


if __name__ == "__main__":
    main(sys.argv[1:])
