"""Quantised weights without data, for the plan of a script: what transformers would make of a checkpoint's weights.

transformers' own quantizer says which weights are packed, and puts its layers in place. Of bitsandbytes 4 bits are
made here, in their shapes; torchao packs weights without data by itself.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError

SCALES = 256  # of bitsandbytes', which share one where they are packed in their turn


def quantise(model: Any, config: Any) -> None:
    """Give a model of transformers, which has no data, weights as this config of a quantisation packs them."""
    quantizers = importlib.import_module("transformers.quantizers")
    quantizer = quantizers.AutoHfQuantizer.from_config(config, pre_quantized=False)
    given = quantizer.quantization_config
    method = str(getattr(given.quant_method, "value", given.quant_method))
    if not (method == "torchao" or getattr(given, "load_in_4bit", False)):
        raise UnsupportedError(
            f"a plan of a script makes weights as torchao packs them, or bitsandbytes in 4 bits, and {method} here is "
            "neither: plan the config in bf16 (plan --model), or leave quantization_config out"
        )
    quantizer.preprocess_model(model, device_map=None)
    packed = [name for name, _ in model.named_parameters() if quantizer.param_needs_quantization(model, name)]
    for layer in (model.get_submodule(name.rpartition(".")[0]) for name in packed if name.endswith(".weight")):
        if method == "torchao":
            layer.requires_grad_(False)
            torchao = importlib.import_module("torchao.quantization")
            torchao.quantize_(layer, given.get_apply_tensor_subclass(), filter_fn=lambda *_: True)
        else:
            _pack(layer, given)
    model.hf_quantizer, model.config.quantization_config = quantizer, given
    model.is_loaded_in_4bit = method != "torchao"
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def _pack(layer: Any, given: Any) -> None:
    """Give a layer of bitsandbytes the weight that it has once it is packed in 4 bits."""
    library = importlib.import_module("bitsandbytes")
    plain = layer.weight
    size = plain.blocksize
    scales = _empty(-(-plain.numel() // size), dtype=torch.float32)
    state = library.functional.QuantState(
        scales, plain.shape, _empty(16), size, given.bnb_4bit_quant_type, layer.compute_dtype or plain.dtype
    )
    if given.bnb_4bit_use_double_quant:
        state.absmax, state.offset, state.nested = _empty(scales.numel(), dtype=torch.uint8), _empty(()), True
        state.state2 = library.functional.QuantState(_empty(-(-scales.numel() // SCALES)), None, _empty(256), SCALES)
        state.state2.dtype = torch.float32
    bytes_of_one = given.bnb_4bit_quant_storage.itemsize
    packed = _empty((-(-plain.numel() // (2 * bytes_of_one)), 1), dtype=given.bnb_4bit_quant_storage)
    layer.weight = type(plain)(
        packed,
        requires_grad=False,
        quant_state=state,
        blocksize=size,
        compress_statistics=given.bnb_4bit_use_double_quant,
        quant_type=given.bnb_4bit_quant_type,
        quant_storage=given.bnb_4bit_quant_storage,
        module=layer,
        bnb_quantized=True,
    )
    layer.quant_state = state


def _empty(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
