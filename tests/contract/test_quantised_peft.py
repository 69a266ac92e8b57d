"""peft's own adapters over a base of torchao's: they train, generate and are saved as without streaming."""

from __future__ import annotations

import copy

import pytest
import torch
import wrapped
from side_by_side import check, sgd

import parity

pytest.importorskip("peft")
pytest.importorskip("torchao")
pytestmark = pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated")


def trained(module, device, steps=2):
    optimizer = sgd(module)
    for step in range(steps):
        ids = wrapped.tokens(device, step)
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        yield loss, [p.grad for p in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()


def generated(module, device):
    module.eval()
    return module.generate(input_ids=wrapped.tokens(device, 9), max_new_tokens=4, do_sample=False, pad_token_id=0)


def trained_and_generated(module, device):
    yield from trained(module, device)
    yield generated(module, device)
    with module.disable_adapter():
        yield generated(module, device)


@parity.product(form=wrapped.TRAINED, activations=["keep", "recompute"], window=[1, 2], device=parity.DEVICES)
def test_adapters_of_peft_train_and_generate(device, form, activations, window):
    check(wrapped.llama(form), trained_and_generated, device, activations=activations, window=window)


def test_saved_adapters_are_those_of_the_plain_run(tmp_path):
    from safetensors.torch import load_file

    def run(module, device):
        yield from trained(module, device)
        module.save_pretrained(tmp_path)
        yield load_file(tmp_path / "adapter_model.safetensors")
        copied = copy.deepcopy(module)  # which is plain
        yield copied(input_ids=wrapped.tokens(device, 0)).logits

    check(wrapped.llama("int8"), run, torch.device("cpu"))
