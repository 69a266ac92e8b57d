"""Figures of a stream, for `stats()`, and errors of the user's code with figures of what fills the device."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..compat.dynamo import Unsupported
from ..errors import SuperpipelineError, UnsupportedError
from ..host.device import Device, DeviceMemoryError
from ..options import format_bytes
from ..stream.activations import Activations
from ..stream.unit import Unit
from ..stream.window import Window
from .compiled import variant_in_use

BETWEEN_DEVICES = re.compile(  # torch's messages about tensors on two devices
    r"(on|at|in) (the )?same device|expected device|two devices"
    r"|\(torch\.\w+\.\w+\) and \w+ type \(torch\.\w+\) should be the same"
)


def stats_of(units: Sequence[Unit], window: Window, device: Device, pending: str | None) -> dict[str, Any]:
    """Collect what `stats()` returns: counters of a stream, and bytes on the device and on the host."""
    numbers = [unit.numbers() for unit in units]
    resident = sum(unit.up_nbytes for unit in numbers if unit.resident)
    kept = sum(unit.down_nbytes for unit in numbers if unit.resident)
    streamed = [unit for unit in numbers if not unit.resident]
    largest = sorted((unit.up_nbytes for unit in streamed), reverse=True)[: window.room.window]
    gradients = sum(unit.down_nbytes for unit in streamed)
    weights = [weight for unit in units for weight in unit.weights if weight.place is None]
    on_host = sum(weight.value.untyped_storage().nbytes() for weight in weights)
    wires = sum(weight.wire.nbytes for weight in weights if weight.is_narrow)
    counters = device.counters
    return {
        # Since streaming began
        "fetches": counters.fetches,  # units copied to the device
        "bytes_up": counters.nbytes["up"],  # copied to the device
        "bytes_down": counters.nbytes["down"],  # copied to the host
        "disk_read": counters.nbytes["disk in"],  # bytes of weights, state and gradients, from files
        "disk_written": counters.nbytes["disk out"],
        "evictions": counters.evictions,  # units whose device memory was given back
        "stepped_ahead": counters.stepped_ahead,  # parameters stepped while backward ran
        "held_steps": counters.held_steps,  # optimizer steps that ran beside the next forward
        "surprises": counters.surprises,  # visits that were not the predicted one
        # Now
        "pending_step": pending,  # "in backward" or "deferred" while an optimizer step runs beside other work
        "compiled_step": variant_in_use(),  # "avx512", "avx2" or "default"; None while torch steps
        "window": window.room.window,  # units
        "transfer": window.room.transfer,  # units
        "units": len(streamed),
        "resident_root_bytes": resident,  # weights that stay on the device
        "weight_bytes": sum(unit.up_nbytes for unit in numbers),  # all weights, as they are on the device
        "resident_bytes": resident + window.loaded_nbytes,  # weights that are on the device
        # On the device, of resident weights and of a full window, with their gradients
        "window_bytes": resident + kept + sum(largest) + 2 * max((unit.down_nbytes for unit in streamed), default=0),
        "device_peak": device.memory_peak(),  # bytes, so far
        "host_weight_bytes": on_host + wires,  # host memory of weights and their wire copies
        "host_gradient_bytes": gradients,  # host memory that gradients take in a step
    }


@contextlib.contextmanager
def explaining(window: Window, policy: Activations, device: Device) -> Iterator[None]:
    """Turn errors of the user's code in this context into errors that say what to do."""
    try:
        yield
    except SuperpipelineError:
        raise
    except torch.OutOfMemoryError as error:
        message = _what_fills(window, policy, device)
        window.room.shrink(window.room.window // 2, "the device had no memory for the model's own code")
        raise DeviceMemoryError(f"{error}\n{message}") from error
    except Unsupported as error:
        raise UnsupportedError(
            f"{error}\nA compiled graph ends where a unit is entered, and another begins: leave out fullgraph=True"
            " where you compile code that calls units. If the plain run raises this as well, its graph breaks elsewhere"
        ) from error
    except RuntimeError as error:
        if BETWEEN_DEVICES.search(str(error)) is None:
            raise
        raise UnsupportedError(
            f"{error}\nA weight or gradient on the host met a tensor on {device.torch_device}. Between steps weights"
            " and gradients are on the host; in a step they are on the device where a function of torch gets them. Move"
            " the other tensor, such as a mask that was made between steps. If the plain run raises this as well, a"
            " tensor was created without device="
        ) from error


def _what_fills(window: Window, policy: Activations, device: Device) -> str:
    """Return a message that says what fills the device, and which changes of options would make room."""
    held, changes = window.loaded_nbytes, []
    if not policy.recomputes:
        changes.append("activations='recompute' (each forward runs twice)")
    elif not policy.offloads:
        changes.append("activations='recompute+offload' (inputs of units go to the host and come back)")
    if window.room.window > 1:
        changes.append("window=1 (no weights are loaded while a unit computes)")
    changes.append(
        "batches of half the size and accumulate_grad_batches twice as large (weights are loaded twice as often)"
    )
    return (
        f"superpipeline: of {format_bytes(device.memory_capacity())} on {device.torch_device}, the window of"
        f" {window.room.window} took {format_bytes(held)}, and activations, gradients, buffers and all else"
        f" {format_bytes(device.memory_allocated() - held)}; to make room: " + "; ".join(changes)
    )
