"""Fine-tune a mixture of experts of transformers (Mixtral, Qwen-MoE, ...)."""

from pathlib import Path
from typing import Any

import torch

from ..common import tiny
from ..common.errors import BadInput
from ..finetune_llm.module import FineTuneLLM
from .experts import fused_state, separate


class FineTuneMoE(FineTuneLLM):
    """A mixture of experts whose experts are modules, so that each can be a unit. Its arguments are FineTuneLLM's."""

    make_tiny = staticmethod(tiny.mixture)

    def load(self) -> Any:
        model = super().load()
        if not separate(model):
            raise BadInput(
                f"{type(model).__name__} has no layer whose experts are a few tensors in a way that transformers "
                "describes (use_experts_implementation); "
                "examples/finetune_llm trains models without experts"
            )
        return model

    def export(self, folder: Path) -> None:
        with torch.device("meta"):
            fused = type(self.model)(self.model.config)
        fused.save_pretrained(folder, state_dict=fused_state(self.model))
        self.trainer.datamodule.tokenizer.save_pretrained(folder)
