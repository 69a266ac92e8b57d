"""Commands of ``python -m sp_lightning`` beside LightningCLI's: a module each, with what it takes and what it does.

A module has ``add_arguments(parser)``, which imports nothing heavy, and ``main(args)``, which prints and returns an
exit status. It only translates: what it prints is made by a library module that can be called without it.
"""

from __future__ import annotations

from pathlib import Path


def check_picture(path: str) -> None:
    """Before the work is done for which it is drawn."""
    from ..errors import OptionError
    from .plan_plot import check_matplotlib

    check_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix.removeprefix(".").lower() not in endings:
        raise OptionError(argument="plot", found=path, allowed=f"a file that ends in one of .{', .'.join(endings)}")
