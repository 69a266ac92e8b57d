"""When an optimizer may step beside backward: by the user hooks that run between the two."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch.optim import Optimizer

from ..compat.lightning import BEFORE_STEP
from ..compat.torch import COUNTS_STEPS
from .names import Callback, LightningModule, Strategy

CALLBACKS_BEFORE_STEP = ("on_after_backward", "on_before_optimizer_step")
MODULE_BEFORE_STEP = (*CALLBACKS_BEFORE_STEP, "backward", "configure_gradient_clipping", "optimizer_step")
STRATEGY_BEFORE_STEP = ("backward", "post_backward")
PLUGIN_BEFORE_STEP = (*STRATEGY_BEFORE_STEP, "optimizer_step", "clip_gradients", *BEFORE_STEP)


def why_gradients_must_be_final(strategy: Strategy, module: LightningModule, optimizer: Optimizer) -> str | None:
    """Say which hook or setting needs final gradients before the optimizer steps, or return None.

    A hook between backward and the step may read or change gradients: if there is one, no unit is stepped while
    backward runs. The same holds where SLURM may requeue the job: Lightning's signal handler saves a checkpoint at any
    time.
    """
    plugin, environment = strategy.precision_plugin, getattr(strategy, "cluster_environment", None)
    if not module.trainer.callbacks:  # type: ignore[attr-defined]  # the strategy adds one, which Lightning's tuner takes out
        return "in trials of a tuner, which may fail in backward and are followed by others"
    if module.trainer.gradient_clip_val:
        return "gradients are clipped"
    if getattr(plugin, "scaler", None) is not None:
        return "the gradient scaler needs all gradients first"
    if getattr(environment, "auto_requeue", False):
        return "SLURM's signal may save a checkpoint at any time: SLURMEnvironment(auto_requeue=False) ends that"
    if _has_replaced_step(optimizer):
        return "the optimizer's step method was replaced"
    return (
        _hooked(module, MODULE_BEFORE_STEP, CALLBACKS_BEFORE_STEP)
        or _overrides(strategy, STRATEGY_BEFORE_STEP)
        or _overrides(plugin, PLUGIN_BEFORE_STEP)
    )


def _hooked(module: LightningModule, own: Iterable[str], of_callbacks: Collection[str]) -> str | None:
    """Name the first of these hooks that the module or a callback overrides."""
    for hook in own:
        if _has_own(hook, module, LightningModule):
            return f"{type(module).__name__} overrides {hook}"
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        for hook in of_callbacks:
            if _has_own(hook, callback, Callback):
                return f"{type(callback).__name__} overrides {hook}"
    return None


def _has_own(hook: str, part: object, base: type) -> bool:
    """Whether a module or callback has its own version of a hook.

    Any callable counts: it may be set on the object, or be created on access, as a mock does. Lightning's
    ``is_overridden`` recognises functions only, and mistakes a wrapper for the function that it wraps."""
    return hook in vars(part) or getattr(type(part), hook, None) is not getattr(base, hook)


def _overrides(part: object, methods: Collection[str]) -> str | None:
    """Name the first of these methods that comes from the user's code: not from Lightning's classes, nor from ours."""
    known = ("lightning", "pytorch_lightning", "lightning_fabric", "sp_lightning")
    places = [part, *(kind for kind in type(part).__mro__ if kind.__module__.partition(".")[0] not in known)]
    method = next((method for place in places for method in methods if method in vars(place)), None)
    return None if method is None else f"{type(part).__name__} overrides {method}"


def _has_replaced_step(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step`` was replaced by a function that may run backward or change gradients by itself.

    The wrapper in which a learning rate scheduler counts steps is no replacement."""
    step = vars(optimizer).get("step")
    only_counts = hasattr(step, COUNTS_STEPS) and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is not None and not only_counts
