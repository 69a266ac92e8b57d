"""The strategy for Ray Train, whose ``prepare_trainer`` takes it: each worker is a rank. Imports ``ray``.

1. Ray starts the workers, gives each a device, and makes the process group: ranks, their number and the device are its
   context's, whatever Lightning found.
2. `Team` finds which workers are on one machine and share its host copy; Ray counts each of its agents as a node.
3. ``prepare_trainer`` asks for a strategy of Ray's or a subclass of one. Ours counts as one, and inherits none of DDP.
"""

from __future__ import annotations

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from ray import train
from ray.train.lightning import RayDDPStrategy
from ray.train.torch import get_device

from ..errors import OptionError
from ..lightning.strategy import SuperpipelineStrategy

__all__ = ["RaySuperpipelineStrategy"]


class RaySuperpipelineStrategy(SuperpipelineStrategy):
    """The superpipeline strategy in a worker of Ray Train, with the arguments of `SuperpipelineStrategy`.

    The Trainer gets ``plugins=[RayLightningEnvironment()]`` and ``devices="auto"``, as with Ray's own strategies. The
    number of workers is that of Ray's ``ScalingConfig``, and the device Ray's.
    """

    world_size = property(lambda self: train.get_context().get_world_size(), lambda self, _: None)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The arguments of Lightning's DistributedSampler; one worker alone has some, too, as in Ray's DDP (Rule 3)."""
        return self._axes.share(self.global_rank)

    def _take_devices(self, devices: list[torch.device]) -> list[torch.device]:
        """Return the device that Ray gives this worker, in place of those that Lightning found."""
        device = get_device()
        if devices[0].type != device.type:
            raise OptionError(
                argument="accelerator",
                found=devices[0].type,
                allowed=f"'auto', or that of the workers' devices, which is {device.type}: ScalingConfig(use_gpu=True) "
                "gives each worker a GPU",
            )
        self._num_processes = train.get_context().get_local_world_size()
        self._check_devices()
        return [device]

    def set_world_ranks(self) -> None:
        """Set the rank that Lightning's rank-zero functions read to Ray's."""
        setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010  # an attribute of a function


RayDDPStrategy.register(RaySuperpipelineStrategy)  # Rule 3
