"""Stream the models of Hugging Face's Trainer, of TRL and of loops with accelerate: ``sp_lightning.hf.streaming``.

Importing this package imports nothing of theirs; opening the context imports accelerate.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from ..errors import OptionError
from ..options import parse_with_waits, truth
from .context import Streaming

__all__ = ["enable", "streaming"]


def streaming(only_if_needed: bool = False, **options: Any) -> Streaming:
    """Return a context in which every model streams that code moves to the device or prepares with accelerate.

    Args:
        only_if_needed: Leave a model to stock code if it fits on the device with gradients, the optimizer's state and
            activations. A line in the log says of each model what was decided.
        **options: As for ``SuperpipelineStrategy``: ``window``, ``transfer``, ``units``, ``activations``, ... With
            ``master_weights`` FP32 weights are bfloat16 on the device. With several processes: also ``timeout``, for
            how long each waits for the others, and ``keepalive``, for how long one may give no sign before the others
            end.
    """
    parsed, waits = parse_with_waits("only_if_needed", **options)
    only_if_needed = truth("only_if_needed", only_if_needed)
    processes = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    parsed.check_devices(processes)
    if only_if_needed and processes > 1:
        raise OptionError(argument="only_if_needed", found=True, allowed="False with several processes")
    return Streaming(parsed, only_if_needed, **waits)


def enable(**options: Any) -> Streaming:
    """Stream models from here on as in the context of ``streaming``, until ``close()`` of the returned object."""
    return streaming(**options).__enter__()
