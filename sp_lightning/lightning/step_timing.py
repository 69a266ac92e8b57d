"""When an optimizer may step beside backward: by the user hooks that run between the two."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer

from ..compat.lightning import BEFORE_STEP
from ..compat.torch import COUNTS_STEPS
from .names import Callback, LightningModule, Strategy

CALLBACKS_BEFORE_STEP = ("on_after_backward", "on_before_optimizer_step")
MODULE_BEFORE_STEP = (*CALLBACKS_BEFORE_STEP, "backward", "configure_gradient_clipping", "optimizer_step")
STRATEGY_BEFORE_STEP = ("backward", "post_backward")
KNOWN = "lightning", "pytorch_lightning", "lightning_fabric", "sp_lightning"  # packages
PLUGIN_BEFORE_STEP = (*STRATEGY_BEFORE_STEP, "optimizer_step", "clip_gradients", *BEFORE_STEP)


def why_gradients_must_be_final(strategy: Strategy, module: LightningModule, optimizer: Optimizer) -> str | None:
    """Say which hook or setting needs final gradients before the optimizer steps, or return None.

    A hook between backward and the step may read or change gradients: if there is one, no unit is stepped while
    backward runs. The same holds where SLURM may requeue the job: Lightning's signal handler saves a checkpoint at any
    time.
    """
    plugin, environment = strategy.precision_plugin, getattr(strategy, "cluster_environment", None)
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    if not callbacks:  # the strategy adds one, which Lightning's tuner takes out
        return "in trials of a tuner, which may fail in backward and are followed by others"
    if module.trainer.gradient_clip_val:
        return "gradients are clipped"
    if getattr(plugin, "scaler", None) is not None:
        return "the gradient scaler needs all gradients first"
    if getattr(environment, "auto_requeue", False):
        return "SLURM's signal may save a checkpoint at any time: SLURMEnvironment(auto_requeue=False) ends that"
    if _has_replaced_step(optimizer):
        return "the optimizer's step method was replaced"
    found = [
        _overrides(module, MODULE_BEFORE_STEP, LightningModule),
        *(_overrides(callback, CALLBACKS_BEFORE_STEP, Callback) for callback in callbacks),
        _overrides(strategy, STRATEGY_BEFORE_STEP),
        _overrides(plugin, PLUGIN_BEFORE_STEP),
    ]
    return next(filter(None, found), None)


def _overrides(part: object, hooks: Iterable[str], base: type | None = None) -> str | None:
    """Name the first of these hooks of which a part has its own version, instead of its base's.

    Without a base the versions of Lightning's classes and of ours are no others. Any callable counts: it may be set on
    the object. Lightning's ``is_overridden`` recognises functions only, and mistakes a wrapper for what it wraps.
    """
    kinds = type(part).__mro__
    known = base.__mro__ if base else [kind for kind in kinds if kind.__module__.partition(".")[0] in KNOWN]
    places = [part, *(kind for kind in kinds if kind not in known)]
    hook = next((hook for place in places for hook in hooks if hook in vars(place)), None)
    return None if hook is None else f"{type(part).__name__} overrides {hook}"


def _has_replaced_step(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step`` was replaced by a function that may run backward or change gradients by itself.

    The wrapper in which a learning rate scheduler counts steps is no replacement."""
    step = vars(optimizer).get("step")
    only_counts = hasattr(step, COUNTS_STEPS) and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is not None and not only_counts
