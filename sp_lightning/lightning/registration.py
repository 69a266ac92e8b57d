"""Register "superpipeline" as the name of the strategies, with Lightning's Trainer and with its Fabric."""

from .fabric import SuperpipelineFabricStrategy
from .names import FabricStrategyRegistry, StrategyRegistry
from .strategy import SuperpipelineStrategy

NAME = "superpipeline"


def register() -> None:
    """Register the strategies under their name; doing so again changes nothing."""
    if NAME not in StrategyRegistry:
        StrategyRegistry.register(NAME, SuperpipelineStrategy, description="Streams a model through one device")
    if NAME not in FabricStrategyRegistry:
        FabricStrategyRegistry.register(
            NAME, SuperpipelineFabricStrategy, description="Streams modules through one device"
        )
