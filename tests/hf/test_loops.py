"""Loops with accelerate leave the same bits when their models stream."""

from __future__ import annotations

import functools

import pytest
import torch
from accelerate import Accelerator
from hf_runs import compare, llama, rows
from torch.utils.data import DataLoader


def loop(folder, accumulate=1, zeroes_first=False, **options):
    torch.manual_seed(1)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, **options)
    loader = DataLoader(rows(), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(2):
        for index, batch in enumerate(loader):
            with accelerator.accumulate(model):
                if zeroes_first:
                    optimizer.zero_grad()
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    yield f"norm {epoch}.{index}", accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                if not zeroes_first:
                    optimizer.zero_grad()
                yield f"loss {epoch}.{index}", loss
    accelerator.save_state(str(folder / "state"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(folder / "state"))
    model.eval()
    with torch.no_grad():
        yield "logits", model(**next(iter(loader))).logits
    yield "tokens", accelerator.unwrap_model(model).generate(rows(1)[0]["input_ids"][None].to(accelerator.device))
    yield "weights", accelerator.unwrap_model(model).state_dict()
    yield "state", optimizer.state_dict()["state"]


LOOPS = {
    "plain": {},
    "bf16 and accumulating": {"accumulate": 2, "mixed_precision": "bf16"},
    "zeroing first": {"zeroes_first": True},
}
SLOW = [("bf16 and accumulating", "cpu"), ("zeroing first", "simgpu"), ("plain", "cpu")]


@pytest.mark.parametrize(
    "kind, device",
    [
        pytest.param(
            kind,
            device,
            marks=[pytest.mark.slow] * ((kind, device) in SLOW) + [pytest.mark.simgpu] * (device == "simgpu"),
        )
        for kind in LOOPS
        for device in ("cpu", "simgpu")
    ],
    indirect=["device"],
)
def test_a_loop_leaves_the_bits_of_the_stock_run(kind, device, tmp_path):
    found = compare(functools.partial(loop, **LOOPS[kind]), tmp_path)
    assert found["held_steps"] == [{"bf16 and accumulating": 3}.get(kind, 7)]
