"""Who of the user's is called between backward, the optimizer's step and the next forward, and may look at what is not
there yet.

1. Between backward and the step somebody may look at gradients, or change them: then nothing is stepped while backward
   runs (step_in_backward.py).
2. Between the step and the next forward somebody may look at weights: he would wait for the step, so that letting it
   run on gains nothing (deferred_step.py). Lightning's own callbacks that look at no weights are known; a subclass of
   one may.
3. What is in a class of Lightning's or ours is known. What is in any other class, or in an object itself, is not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer

from .callback import SuperpipelineCallback

CALLBACKS_BEFORE_STEP = ("on_after_backward", "on_before_optimizer_step")
MODULE_BEFORE_STEP = (*CALLBACKS_BEFORE_STEP, "backward", "configure_gradient_clipping", "optimizer_step")
STRATEGY_BEFORE_STEP = ("backward", "post_backward")
PLUGIN_BEFORE_STEP = (*STRATEGY_BEFORE_STEP, "optimizer_step", "clip_gradients", "_clip_gradients", "_after_closure")

CALLBACKS_BEFORE_NEXT = ("on_train_batch_end", "on_train_batch_start", "on_before_zero_grad")
MODULE_BEFORE_NEXT = (*CALLBACKS_BEFORE_NEXT, "optimizer_zero_grad", "optimizer_step")
LOOK_AT_NO_WEIGHTS = frozenset(
    {SuperpipelineCallback, ModelCheckpoint, LearningRateMonitor, DeviceStatsMonitor, ThroughputMonitor, Timer}
    | {TQDMProgressBar, RichProgressBar}
)


def backward_and_step(strategy: Strategy, module: LightningModule, optimizer: Optimizer) -> str | None:
    """Who comes between them (Rule 1)."""
    plugin = strategy.precision_plugin
    if module.trainer.gradient_clip_val:
        return "gradients are clipped"
    if getattr(plugin, "scaler", None) is not None:
        return "the gradient scaler has to see all gradients first"
    if _steps_otherwise(optimizer):
        return "somebody replaced the optimizer's step"
    return (
        _hooked(module, MODULE_BEFORE_STEP, CALLBACKS_BEFORE_STEP, known=())
        or _overrides(strategy, STRATEGY_BEFORE_STEP)
        or _overrides(plugin, PLUGIN_BEFORE_STEP)
    )


def step_and_next(module: LightningModule) -> str | None:
    """Who comes between a step and the next forward (Rule 2)."""
    return _hooked(module, MODULE_BEFORE_NEXT, CALLBACKS_BEFORE_NEXT, known=LOOK_AT_NO_WEIGHTS)


def next_is_a_training_step(trainer: Any) -> bool:
    """Whether no validation, end of an epoch or end of training comes first."""
    epoch = trainer.fit_loop.epoch_loop
    stops = trainer.should_stop or trainer.received_sigterm
    ends = epoch._num_ready_batches_reached() or (epoch.max_steps != -1 and epoch.global_step + 1 >= epoch.max_steps)
    validates = trainer._val_check_time_interval is not None  # by the clock: at any time
    return not (stops or ends or validates or epoch._should_check_val_fx(trainer.fit_loop._data_fetcher))


def _hooked(
    module: LightningModule, own: Iterable[str], of_callbacks: Collection[str], known: Collection[type]
) -> str | None:
    """Which of these hooks the module or a callback overrides."""
    for hook in own:
        if _has_own(hook, module, LightningModule):
            return f"{type(module).__name__} overrides {hook}"
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        for hook in of_callbacks:
            if type(callback) not in known and _has_own(hook, callback, Callback):
                return f"{type(callback).__name__} overrides {hook}"
    return None


def _has_own(hook: str, part: object, base: type) -> bool:
    """Whether this hook is another than the base class's: whatever can be called may be one, and may be set on the
    object, or made when it is asked for, as a mock does. Lightning's ``is_overridden`` knows functions only, and takes
    what wraps one for that one."""
    return hook in vars(part) or getattr(type(part), hook, None) is not getattr(base, hook)


def _overrides(part: object, methods: Collection[str]) -> str | None:
    """Which of these methods it has from elsewhere (Rule 3)."""
    known = ("lightning", "sp_lightning")
    places = [part, *(kind for kind in type(part).__mro__ if kind.__module__.partition(".")[0] not in known)]
    method = next((method for place in places for method in methods if method in vars(place)), None)
    return None if method is None else f"{type(part).__name__} overrides {method}"


def _steps_otherwise(optimizer: Optimizer) -> bool:
    """Whether its ``step`` is not that of its class, which a scheduler wraps to count: it may run backward by itself,
    and change gradients before it steps."""
    step = vars(optimizer).get("step")
    counts = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is not None and not counts
