"""Fine-tune a language model on chats with TRL's SFTTrainer, by adapters or as a whole.

python -m sp_lightning launch --activations recompute -- -m examples.hf.sft --config examples/hf/sft.yaml
"""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

from examples.common import tiny


def main() -> None:
    """Train on lines of ``{"messages"}``, and write model or adapters to ``output_dir``."""
    data, training, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
    base = model.model_name_or_path or tiny.language_model()
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=model.dtype),
        args=training,
        train_dataset=load_dataset("json", data_files=data.dataset_name, split="train"),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=get_peft_config(model),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
