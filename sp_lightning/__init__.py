"""Train models that do not fit on the device: ``Trainer(strategy="superpipeline")``.

Importing this package registers the strategy with Lightning, and does nothing else.
"""

from lightning.pytorch.strategies import StrategyRegistry

from .callback import SuperpipelineCallback
from .handle import Handle, stream
from .plan import Plan, plan
from .strategy import SuperpipelineStrategy

__all__ = ["Handle", "Plan", "SuperpipelineCallback", "SuperpipelineStrategy", "plan", "stream"]

if "superpipeline" not in StrategyRegistry:
    StrategyRegistry.register("superpipeline", SuperpipelineStrategy, description="Streams a model through one device")
