"""Train models that do not fit on the device: ``Trainer(strategy="superpipeline")``.

Importing this package registers the strategies with Lightning, and with ``pytorch_lightning`` if that was imported
before, and does nothing else.
"""

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
    from . import pytorch_lightning as pytorch_lightning
