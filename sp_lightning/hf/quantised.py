"""Quantised weights without data, for the plan of a script: what transformers would make of a checkpoint's weights.

transformers' own quantizer says which weights are packed, and torchao packs weights without data by itself.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import UnsupportedError


def quantise(model: Any, config: Any) -> None:
    """Give a model of transformers, which has no data, weights as this config of a quantisation packs them."""
    quantizers = importlib.import_module("transformers.quantizers")
    quantizer = quantizers.AutoHfQuantizer.from_config(config, pre_quantized=False)
    given = quantizer.quantization_config
    method = str(getattr(given.quant_method, "value", given.quant_method))
    if method != "torchao":
        raise UnsupportedError(
            f"a plan of a script makes weights as torchao packs them, and {method} here is another library: use "
            "TorchAoConfig, plan the config in bf16 (plan --model), or leave quantization_config out"
        )
    quantizer.preprocess_model(model, device_map=None)
    packed = [name for name, _ in model.named_parameters() if quantizer.param_needs_quantization(model, name)]
    for layer in (model.get_submodule(name.rpartition(".")[0]) for name in packed if name.endswith(".weight")):
        layer.requires_grad_(False)
        torchao = importlib.import_module("torchao.quantization")
        torchao.quantize_(layer, given.get_apply_tensor_subclass(), filter_fn=lambda *_: True)
    model.hf_quantizer, model.config.quantization_config = quantizer, given
    for parameter in model.parameters():
        parameter.requires_grad_(False)
