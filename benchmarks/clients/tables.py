"""Libraries that learn from tables."""

from typing import Any

import numpy

from .harness import client


@client(
    "pytorch-tabular",
    "pytorch-lightning",
    "`TrainerConfig(trainer_kwargs={'strategy': 'superpipeline'})`",
    "`import sp_lightning.pytorch_lightning`",
)
def pytorch_tabular(strategy: str) -> Any:
    """An FT-Transformer and a category embedding model, with validation, early stopping and checkpoints."""
    import pandas
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig, FTTransformerConfig

    draw = numpy.random.default_rng(0)
    frame = pandas.DataFrame(draw.normal(size=(128, 4)), columns=list("abcd"))
    frame["kind"] = draw.choice(["x", "y", "z"], 128)
    frame["label"] = (frame["a"] + frame["b"] > 0).astype(int)
    results = []
    for config in (
        FTTransformerConfig(task="classification", input_embed_dim=8, num_heads=2, num_attn_blocks=3),
        CategoryEmbeddingModelConfig(task="classification", layers="16-16-16", dropout=0.1),
    ):
        model = TabularModel(
            data_config=DataConfig(target=["label"], continuous_cols=list("abcd"), categorical_cols=["kind"]),
            model_config=config,
            optimizer_config=OptimizerConfig(),
            trainer_config=TrainerConfig(
                max_epochs=2,
                batch_size=32,
                accelerator="cpu",
                progress_bar="none",
                load_best=True,
                trainer_kwargs={"strategy": strategy, "enable_model_summary": False},
            ),
            verbose=False,
        )
        model.fit(frame[:96], frame[96:])
        results += [model.model, model.predict(frame[96:]).filter(like="probability").to_numpy()]
    return results
