"""Train low-rank adapters on a frozen causal language model, through peft."""

from pathlib import Path
from typing import Any

from ..common.arguments import PositiveInt
from ..common.checkpoints import adapted, keep_trained
from ..common.quantized import Form, quantize
from ..finetune_llm.module import FineTuneLLM


class LoraLLM(FineTuneLLM):
    """A frozen language model with adapters, which alone are trained, saved in checkpoints and exported.

    Args:
        rank: Of the adapters.
        alpha: What they add is scaled by ``alpha / rank``.
        dropout: In front of the adapters.
        targets: Names of the layers that get one. None: every linear layer but the head.
        base_bits: Pack the frozen weights: 8 or 4 with bitsandbytes; "int8", "float8", "nf4" or "nvfp4" with torchao.
        **options: FineTuneLLM's.
    """

    def __init__(
        self,
        rank: PositiveInt = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        targets: list[str] | None = None,
        base_bits: Form | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.rank = rank
        self.alpha = alpha
        self.dropout = dropout
        self.targets = targets
        self.base_bits = base_bits
        self.strict_loading = False  # a checkpoint holds the adapters; the base is read from its own

    def load(self) -> Any:
        from peft import LoraConfig

        base = super().load()
        if self.base_bits is not None:
            quantize(base, self.base_bits, leave=[base.get_output_embeddings()])
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.targets or "all-linear",
            task_type="CAUSAL_LM",
        )
        return adapted(base, config).train()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        keep_trained(self, checkpoint)

    def export(self, folder: Path) -> None:
        """Writes the adapters, as ``PeftModel.from_pretrained`` reads them."""
        self.model.save_pretrained(folder)
