"""Draws the pictures of docs/recurrence.md, from real runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from torch import Tensor

from flashsoftmax import attention, merge

from .support import style
from .support.command import Run, parser
from .support.tiled import steps

TILE = 8


def rising(tiles: int) -> Tensor:
    """Scores of one row, [1, keys]: the maximum of a tile rises several times, falls and rises again."""
    torch.manual_seed(3)
    keys = tiles * TILE
    hills = 2.5 * torch.sin(torch.arange(keys) / 13.0) + torch.arange(keys) / 30.0
    return (hills + torch.randn(keys))[None]


def state(path: Path) -> None:
    """m, the factor, l and one element of the output, after each tile."""
    tiles = 12
    scores, values = rising(tiles), torch.randn(tiles * TILE, 4)
    right, behind = (list(steps(scores, values, TILE, rescale_acc=rescale)) for rescale in (True, False))
    exact = (scores.double().softmax(1) @ values.double())[0, 0].item()
    after = [TILE * (n + 1) for n in range(tiles)]
    with style.picture(path, 2, 2, "one row, 12 tiles of 8 keys", size=(4.6, 2.3)) as (_, grid):
        (scores_axes, factor_axes), (sum_axes, output_axes) = grid
        scores_axes.plot(range(tiles * TILE), scores[0], color=style.PEER, marker=".", linestyle="none")
        # Each m is drawn over the keys of its tile.
        m = [step.m.item() for step in right]
        scores_axes.step([0, *after], [m[0], *m], where="pre", color=style.OURS)
        scores_axes.set_title("scores, and m after each tile", loc="left")
        factor_axes.bar(after, [step.alpha.item() for step in right], width=5, color=style.OURS)
        factor_axes.set_title("what l and acc are multiplied by before the tile is added", loc="left")
        factor_axes.set_ylim(0, 1.05)
        sum_axes.plot(after, [step.l.item() for step in right], color=style.OURS, marker="o")
        sum_axes.set_title("l: sum of the weights", loc="left")
        sum_axes.set_ylim(bottom=0)
        for run, color, name in ((right, style.OURS, "acc / l"), (behind, style.WORSE, "acc not rescaled")):
            outputs = [step.output[0, 0].item() for step in run]
            dashes = "-" if run is right else "--"
            output_axes.plot(after, outputs, color=color, marker="o", linestyle=dashes, label=name)
        output_axes.axhline(exact, color=style.LIMIT, linewidth=1.2, linestyle=(0, (1, 1.5)), label="all keys at once")
        output_axes.set_title("one element of the output", loc="left")
        output_axes.legend()
        for axes in (sum_axes, output_axes):
            axes.set_xlabel("keys seen")


def orders(path: Path) -> None:
    """The factors if the largest score comes first, in the middle, or last."""
    tiles = 12
    scores = torch.sort(rising(tiles)[0]).values
    falling = scores.flip(0)
    middle = torch.cat([scores[::2], falling[::2]])
    named = {"largest first": falling, "largest in the middle": middle, "largest last": scores}
    values = torch.randn(tiles * TILE, 4)
    with style.picture(path, 1, 3, "the same 96 scores in three orders", size=(3.6, 2.3)) as (_, (row,)):
        for axes, (name, ordered) in zip(row, named.items(), strict=True):
            factors = [step.alpha.item() for step in steps(ordered[None], values, TILE)]
            axes.bar(range(1, tiles + 1), factors, color=style.OURS)
            axes.set_title(name, loc="left")
            axes.set_xlabel("tile")
            axes.set_ylim(0, 1.05)
        row[0].set_ylabel("factor")


def masked(path: Path) -> None:
    """Causal attention of 12 queries on 8 keys: the first four queries see no key."""
    torch.manual_seed(0)
    queries, keys = 12, 8
    query, key, value = (torch.randn(1, 1, n, 16) for n in (queries, keys, keys))
    out, lse = attention(query, key, value, causal=True, return_lse=True)
    visible = torch.ones(queries, keys).tril(keys - queries).bool()
    scores = (query @ key.mT / 4)[0, 0].masked_fill(~visible, -torch.inf)
    unguarded = torch.exp(scores - scores.amax(1, keepdim=True)).sum(1)
    caption = "12 queries, 8 keys, causal: the last query sees the last key"
    with style.picture(path, 1, 3, caption, size=(3.6, 3)) as (_, ((seen, sums, outputs),)):
        seen.pcolormesh(visible.float(), cmap=style.shades(style.PEER), edgecolor=style.TEXT, linewidth=0.4)
        seen.set_title("keys that a query sees", loc="left")
        seen.set_xlabel("key")
        seen.set_ylabel("query")
        finite, rows = lse[0, 0].isfinite(), torch.arange(queries) + 0.5
        sums.plot(lse[0, 0][finite], rows[finite], color=style.OURS, marker="o", linestyle="none", label="lse")
        low = lse[0, 0][finite].min() - 1
        sums.plot([low] * 4, rows[~finite], color=style.OURS, marker="<", linestyle="none", label="lse = -inf")
        nan = unguarded.isnan()
        sums.plot([low + 0.6] * 4, rows[nan], color=style.WRONG, marker="x", linestyle="none", label="unguarded: NaN")
        sums.set_title("log of the sum of weights", loc="left")
        sums.legend(loc="upper right", fontsize=8)
        outputs.barh(rows.tolist(), out[0, 0].norm(dim=1).tolist(), height=0.7, color=style.OURS)
        outputs.plot([0] * 4, rows[~finite], color=style.OURS, marker="o", linestyle="none", label="exactly 0")
        outputs.set_title("length of the output", loc="left")
        outputs.legend(loc="lower right", fontsize=8)
        for axes in (seen, sums, outputs):
            axes.set_ylim(queries, 0)
            axes.grid(False)


def tree(path: Path) -> None:
    """Attention over eight parts of the keys, computed by the kernels of this machine, and the merge of the parts."""
    torch.manual_seed(1)
    query, key, value = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 1024, 32), torch.randn(1, 1, 1024, 32)
    whole, whole_lse = attention(query, key, value, return_lse=True)
    parts = zip(key.chunk(8, 2), value.chunk(8, 2), strict=True)
    level = [attention(query, k, v, return_lse=True) for k, v in parts]
    with style.picture(path, 1, 1, "attention of one query on 1,024 keys, in eight parts of 128", size=(9, 3.6)) as (
        _,
        ((axes,),),
    ):
        axes.axis("off")
        places = [float(n) for n in range(8)]
        for height in range(4):
            for place, (out, lse) in zip(places, level, strict=True):
                text = f"lse {lse.item():.4f}\nout[0] {out[0, 0, 0, 0]:+.4f}"
                color = style.OURS if height == 3 else style.PEER
                box = {"boxstyle": "round", "facecolor": "none", "edgecolor": color}
                axes.text(place, height, text, ha="center", va="center", fontsize=8.5, bbox=box)
            if height == 3:
                break
            above = [(a + b) / 2 for a, b in zip(places[::2], places[1::2], strict=True)]
            for n, place in enumerate(places):
                xs, ys = [place, above[n // 2]], [height + 0.22, height + 0.78]
                axes.plot(xs, ys, color=style.TEXT, linewidth=1)
            level = [merge([a[0], b[0]], [a[1], b[1]]) for a, b in zip(level[::2], level[1::2], strict=True)]
            places = above
        apart = float((level[0][0] - whole).abs().max())
        said = (
            f"all at once: lse {whole_lse.item():.4f}, out[0] {whole[0, 0, 0, 0]:+.4f}; largest difference {apart:.0e}"
        )
        axes.set_title(said, loc="left")
        axes.set_xlim(-0.6, 7.6)
        axes.set_ylim(-0.4, 3.4)


def zero(path: Path) -> None:
    """The error if m starts at 0: the weights of scores far below 0 underflow in float32."""
    torch.manual_seed(2)
    scores, values = torch.randn(64, 1024), torch.randn(1024, 16)
    means = [-float(x) for x in range(0, 121, 3)]

    def error(first_m: float, mean: float) -> float:
        *_, last = steps(scores + mean, values, 128, first_m=first_m)
        exact = (scores + mean).double().softmax(1) @ values.double()
        return float((last.output - exact).abs().max() / exact.abs().max())

    def draw(axes: Axes, first_m: float, color: str, name: str) -> None:
        errors = [error(first_m, mean) for mean in means]
        held = [(mean, e) for mean, e in zip(means, errors, strict=True) if e == e]
        axes.plot(*zip(*held, strict=True), color=color, label=name, linestyle="-" if first_m else "--")
        lost = [mean for mean, e in zip(means, errors, strict=True) if e != e]
        axes.plot(lost, [10] * len(lost), color=color, marker="x", linestyle="none")

    with style.picture(path, 1, 1, "float32, 64 rows, 1,024 keys; crosses: 0 / 0 = NaN", size=(7, 2.6)) as (
        _,
        ((axes,),),
    ):
        draw(axes, -torch.inf, style.OURS, "m from -inf")
        draw(axes, 0.0, style.WRONG, "m from 0")
        axes.set_yscale("log")
        axes.set_xlabel("mean of the scores")
        axes.set_title("largest error, as a share of the largest value", loc="left")
        axes.legend()


PICTURES = {"state": state, "orders": orders, "masked": masked, "tree": tree, "zero": zero}


def main(argv: Sequence[str]) -> None:
    run = Run.start(parser("recurrence"), argv)
    run.options.out.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        path = run.options.out / f"recurrence-{name}"
        draw(path)
        run.wrote(path)


if __name__ == "__main__":
    main(sys.argv[1:])
