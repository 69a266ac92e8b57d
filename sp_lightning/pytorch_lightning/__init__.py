"""The strategies and the callback for ``pytorch_lightning``: importing this package registers "superpipeline" there.

``pytorch_lightning`` and ``lightning`` are the same code under two names, and neither takes the other's objects. The
modules of `sp_lightning.lightning` therefore run a second time, as modules of this package: they import Lightning from
the names.py beside them, and here that is this folder's.
"""

from pytorch_lightning import __version__ as found  # type: ignore[attr-defined]

from .. import lightning
from ..lightning.registration import register

__path__ += lightning.__path__

try:
    from .callback import SuperpipelineCallback  # type: ignore[import-not-found]
    from .fabric import SuperpipelineFabricStrategy  # type: ignore[import-not-found]
    from .strategy import SuperpipelineStrategy  # type: ignore[import-not-found]
except ImportError as error:
    raise ImportError(f"sp_lightning.pytorch_lightning needs pytorch_lightning 2.6, found {found}: {error}") from error

__all__ = ["SuperpipelineCallback", "SuperpipelineFabricStrategy", "SuperpipelineStrategy"]

register("pytorch_lightning")
