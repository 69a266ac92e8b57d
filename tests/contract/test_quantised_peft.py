"""peft's own adapters over a base of torchao's: they train, generate and are saved as without streaming."""

from __future__ import annotations

import copy

import pytest
import torch
import wrapped
from side_by_side import check, sgd

import parity
from sp_lightning.errors import UnsupportedError

pytest.importorskip("peft")
pytest.importorskip("torchao")
pytestmark = pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated")


def loaded_by_transformers(place):
    """peft learns of transformers how a merged weight is quantised again."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    torch.manual_seed(0)
    wrapped.plain_llama().save_pretrained(place)
    config = TorchAoConfig(quant_type=Int8WeightOnlyConfig(), modules_to_not_convert=["lm_head"])
    options = {"quantization_config": config, "dtype": torch.float32}
    return lambda: wrapped.with_adapters(AutoModelForCausalLM.from_pretrained(place, **options))


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


def merged(module, device):
    yield from trained(module, device)
    module.merge_adapter()
    yield generated(module, device)


def test_adapters_are_not_merged_into_a_quantised_base_while_it_streams(tmp_path):
    """Merging makes another quantised weight: `close()` the stream first."""
    with pytest.raises(
        UnsupportedError, match=r"q_proj\.base_layer\.weight is a Int8Tensor.* came after streaming began"
    ):
        check(loaded_by_transformers(tmp_path), merged, torch.device("cpu"))


def test_saved_adapters_are_those_of_the_plain_run(tmp_path):
    from safetensors.torch import load_file

    def run(module, device):
        yield from trained(module, device)
        module.save_pretrained(tmp_path)
        yield load_file(tmp_path / "adapter_model.safetensors")
        yield copy.deepcopy(module)(
            input_ids=wrapped.tokens(device, 0)
        ).logits  # a copy of the streamed module is plain

    check(wrapped.llama("int8"), run, torch.device("cpu"))
