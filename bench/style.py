"""One look for every picture: no background, and colours that can be read on white and on black."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS = "#f0702a"
PEER = "#3d8bd9"
LIMIT = "#2a9d7a"
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


def panels(rows: int, columns: int) -> tuple[Figure, list[list[Axes]]]:
    """A grid of axes; apply it and all that is drawn within `plt.rc_context(RC)`."""
    figure, axes = plt.subplots(
        rows, columns, figsize=(1 + 4 * columns, 1 + 2.3 * rows), squeeze=False, layout="constrained"
    )
    return figure, axes.tolist()


def save(figure: Figure, path: Path) -> None:
    """As path.png and path.svg."""
    figure.savefig(path.with_suffix(".png"))
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)
