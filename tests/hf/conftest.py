"""accelerate chooses the device of a test, knows none of the test before, and asks no hub."""

import sys

import pytest


@pytest.fixture(autouse=True)
def accelerate_on(request, monkeypatch):
    """accelerate, and with it transformers, uses the device of the test."""
    for name, value in {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    device = request.getfixturevalue("device") if "device" in request.fixturenames else None
    if device is not None and device.type != "cpu":
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(device))
    if device is not None:  # both compute in bfloat16, which they ask of CUDA and of a few others only
        monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
        monkeypatch.setattr("accelerate.accelerator.is_bf16_available", lambda *_, **__: True)
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
