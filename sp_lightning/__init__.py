"""Train models that do not fit on the device: ``Trainer(strategy="superpipeline")``.

Importing this package registers the strategy with Lightning and does nothing else.
"""

from lightning.pytorch.strategies import StrategyRegistry

from .lightning.callback import SuperpipelineCallback
from .lightning.strategy import SuperpipelineStrategy
from .planning import Plan, plan
from .runtime.handle import Handle, stream

__all__ = ["Handle", "Plan", "SuperpipelineCallback", "SuperpipelineStrategy", "plan", "stream"]

if "superpipeline" not in StrategyRegistry:
    StrategyRegistry.register("superpipeline", SuperpipelineStrategy, description="Streams a model through one device")
