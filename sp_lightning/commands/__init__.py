"""The commands of ``python -m sp_lightning`` beside LightningCLI's, one module each.

A module has ``add_arguments(parser)``, which imports nothing heavy, and ``main(args)``, which prints and returns an
exit status. Commands only translate: a library module, which can be called without them, makes what they print.
"""

from __future__ import annotations

from pathlib import Path


def check_picture(path: str) -> None:
    """Raise an error, before any work, if a picture cannot be drawn to this path."""
    from ..errors import OptionError
    from .plan_plot import check_matplotlib

    check_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix.removeprefix(".").lower() not in endings:
        raise OptionError(argument="plot", found=path, allowed=f"a file that ends in one of .{', .'.join(endings)}")
