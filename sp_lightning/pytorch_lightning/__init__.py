"""The strategies and the callback for ``pytorch_lightning``: importing this package registers "superpipeline" there.

``pytorch_lightning`` and ``lightning`` are the same code under two names, and neither takes the other's objects. The
modules of `sp_lightning.lightning` therefore run a second time, as modules of this package: they import Lightning from
the names.py beside them, and here that is this folder's.
"""

from .. import lightning

__path__ += lightning.__path__

from .callback import SuperpipelineCallback  # type: ignore[import-not-found]  # noqa: E402
from .fabric import SuperpipelineFabricStrategy  # type: ignore[import-not-found]  # noqa: E402
from .registration import register  # type: ignore[import-not-found]  # noqa: E402
from .strategy import SuperpipelineStrategy  # type: ignore[import-not-found]  # noqa: E402

__all__ = ["SuperpipelineCallback", "SuperpipelineFabricStrategy", "SuperpipelineStrategy"]

register()
