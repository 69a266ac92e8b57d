"""Train a language model by rewards of its own answers with TRL's GRPOTrainer.

python -m sp_lightning launch --activations recompute -- -m examples.hf.grpo --config examples/hf/grpo.yaml
"""

from typing import Any

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

from examples.common import tiny


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Reward the right number, and a little that an answer is short."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(number in text.split()) - len(text) / 1000 for text, number in zip(texts, answer, strict=True)]


def main() -> None:
    """Train on lines of ``{"prompt", "answer"}``, and write model or adapters to ``output_dir``."""
    data, training, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
    base = model.model_name_or_path or tiny.language_model()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=model.dtype),
        reward_funcs=right,
        args=training,
        train_dataset=load_dataset("json", data_files=data.dataset_name, split="train"),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=get_peft_config(model),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
