"""Losses over the steps, as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import whole


def draw(path: Path, curves: Mapping[str, Sequence[Any]]) -> None:
    """Draw a line for each name, of the losses of all batches, as PNG. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="tight")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="batch", ylabel="loss")
    for name, losses in curves.items():
        axes.plot([float(loss) for loss in losses], label=name)
    if len(curves) > 1:
        axes.legend()
    with whole(path) as part:
        figure.savefig(part, format="png")
