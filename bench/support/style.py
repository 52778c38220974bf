"""The common look of all pictures: no background, and colours that can be read on white and on black."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

OURS = "#f0702a"
PEER = "#3d8bd9"
LIMIT = "#2a9d7a"
MATH = "#8f6fd8"
NAIVE = "#b08d1e"
WRONG = "#d8436b"
WORSE = "#c46fc0"
TEXT = "#808894"

RC: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.titlecolor": TEXT,
    "axes.titlesize": 10,
    "axes.edgecolor": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": TEXT,
    "grid.alpha": 0.2,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "legend.frameon": False,
    "savefig.transparent": True,
    "savefig.dpi": 160,
    "svg.hashsalt": "flashsoftmax",
}


@contextmanager
def picture(
    path: Path, rows: int, columns: int, caption: str, size: tuple[float, float] = (4, 2.3)
) -> Iterator[tuple[Figure, list[list[Axes]]]]:
    """A grid of axes, each of `size` inches, saved as path.png and path.svg. The caption says where it was measured."""
    with plt.rc_context(RC):
        inches = (1 + size[0] * columns, 1 + size[1] * rows)
        figure, axes = plt.subplots(rows, columns, figsize=inches, squeeze=False, layout="constrained")
        yield figure, axes.tolist()
        figure.supxlabel(caption, fontsize=8, x=0.01, ha="left")
        figure.savefig(path.with_suffix(".png"))
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        plt.close(figure)


def shades(color: str) -> LinearSegmentedColormap:
    """A colour map from transparent to `color`."""
    return LinearSegmentedColormap.from_list("shades", ["#00000000", color])


def powers(axes: Axes, values: Iterable[float]) -> None:
    """Makes the x-axis logarithmic, with ticks at these values."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(values))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:.0f}k" if x >= 10240 else f"{x:.0f}"))


def short(count: int) -> str:
    """A number of tokens: 8k, 2M."""
    for power, unit in ((2**20, "M"), (2**10, "k")):
        if count >= power:
            return f"{count / power:.3g}{unit}"
    return f"{count}"


def square(x: float, y: float, color: str) -> Rectangle:
    """A cell of a grid around (x, y)."""
    return Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, color=color, linewidth=0)


def legend(beside: Figure | Axes, looks: Mapping[str, tuple[str, Any]]) -> None:
    """Adds a legend of colours and dashes, above a figure or to the right of axes."""
    handles = [Line2D([], [], color=color, linestyle=dashes, label=name) for name, (color, dashes) in looks.items()]
    if isinstance(beside, Figure):
        beside.legend(handles=handles, loc="outside upper left", ncols=len(handles))
    else:
        beside.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5))
