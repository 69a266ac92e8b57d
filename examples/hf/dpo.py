"""Teach a language model to prefer good answers with TRL's DPOTrainer; without its adapters it is the reference.

python -m sp_lightning launch --activations recompute -- -m examples.hf.dpo --config examples/hf/dpo.yaml
"""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

from examples.common import tiny


def main() -> None:
    """Train on lines of ``{"prompt", "chosen", "rejected"}``, and write model or adapters to ``output_dir``."""
    data, training, model = TrlParser((ScriptArguments, DPOConfig, ModelConfig)).parse_args_and_config()
    base = model.model_name_or_path or tiny.language_model()
    trainer = DPOTrainer(
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
