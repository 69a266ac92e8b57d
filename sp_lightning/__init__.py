"""Train models that do not fit on the device: ``Trainer(strategy="superpipeline")``.

Importing this package registers the strategies with Lightning, and with ``pytorch_lightning`` if that was imported
before and is of a version that they work with, and does nothing else.
"""

import logging
import sys

from .lightning.callback import SuperpipelineCallback
from .lightning.fabric import SuperpipelineFabricStrategy
from .lightning.registration import register
from .lightning.strategy import SuperpipelineStrategy
from .planning import Plan, plan
from .ranks.exchange import tree_hook
from .runtime.handle import Handle, stream

__all__ = [
    "Handle",
    "Plan",
    "SuperpipelineCallback",
    "SuperpipelineFabricStrategy",
    "SuperpipelineStrategy",
    "plan",
    "stream",
    "tree_hook",
]

register()
if "pytorch_lightning" in sys.modules:  # the same Lightning under another name
    try:
        from . import pytorch_lightning as pytorch_lightning
    except ImportError as error:  # some other library imports it: no error for users of `lightning`
        logging.getLogger(__name__).info("not registered with pytorch_lightning: %s", error)
