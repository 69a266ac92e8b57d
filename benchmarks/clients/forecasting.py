"""Libraries that forecast time series."""

from typing import Any

import numpy

from .harness import client

PASSED = "`pl_trainer_kwargs={'strategy': 'superpipeline'}`"
IMPORT = "`import sp_lightning.pytorch_lightning`"


def waves(count: int = 96) -> Any:
    """A series of two waves."""
    steps = numpy.arange(count, dtype="float32")
    return numpy.sin(steps / 4) + numpy.cos(steps / 9)


@client("u8darts", "pytorch-lightning", PASSED, IMPORT)
def darts(strategy: str) -> Any:
    """Transformer and N-BEATS: fitted, fitted on, validated, and forecasting."""
    from darts import TimeSeries
    from darts.models import NBEATSModel, TransformerModel

    series = TimeSeries.from_values(waves())
    trainer = {
        "accelerator": "cpu",
        "strategy": strategy,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "gradient_clip_val": 0.5,
    }
    sizes = {"input_chunk_length": 12, "output_chunk_length": 4, "n_epochs": 2, "batch_size": 16, "random_state": 1}
    results = []
    for model in (
        TransformerModel(d_model=16, nhead=2, dim_feedforward=32, pl_trainer_kwargs=trainer, **sizes),
        NBEATSModel(num_blocks=2, layer_widths=16, pl_trainer_kwargs=trainer, **sizes),
    ):
        model.fit(series[:64], val_series=series[64:])
        model.fit(series[:64], epochs=1)
        results += [model.model, model.predict(8, series=series).values()]
    return results


@client("neuralforecast", "pytorch-lightning", "`NHITS(..., strategy='superpipeline')`, any of its models", IMPORT)
def neuralforecast(strategy: str) -> Any:
    """NHITS and PatchTST over several series, with validation and early stopping."""
    import pandas
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS, PatchTST

    dates = pandas.date_range("2020-01-01", periods=96, freq="D")
    frame = pandas.concat(
        pandas.DataFrame({"unique_id": f"series {i}", "ds": dates, "y": waves() * (i + 1)}) for i in range(3)
    )
    trainer = {
        "accelerator": "cpu",
        "strategy": strategy,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "max_steps": 6,
        "val_check_steps": 3,
        "early_stop_patience_steps": 5,
    }
    models = [
        NHITS(h=6, input_size=24, mlp_units=[[16, 16]] * 3, dropout_prob_theta=0.1, **trainer),
        PatchTST(h=6, input_size=24, hidden_size=16, linear_hidden_size=16, n_heads=2, **trainer),
    ]
    library = NeuralForecast(models=models, freq="D")
    library.fit(frame, val_size=12)
    forecast = library.predict()
    return [*library.models, forecast[["NHITS", "PatchTST"]].to_numpy()]


@client("pytorch-forecasting", "lightning", "the Trainer, and `predict(trainer_kwargs={'strategy': ...})`")
def pytorch_forecasting(strategy: str) -> Any:
    """A temporal fusion transformer with attention, interpreted after the forecast."""
    import lightning as L
    import pandas
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

    frame = pandas.concat(
        pandas.DataFrame({"time": range(96), "group": f"group {i}", "value": waves() * (i + 1)}) for i in range(3)
    ).reset_index(drop=True)
    data = TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=24,
        max_prediction_length=6,
        static_categoricals=["group"],
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
    )
    loader = data.to_dataloader(train=True, batch_size=32, num_workers=0)
    model = TemporalFusionTransformer.from_dataset(
        data, hidden_size=8, attention_head_size=2, hidden_continuous_size=4, learning_rate=0.01
    )
    common = {"accelerator": "cpu", "strategy": strategy, "logger": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        **common, max_epochs=2, limit_train_batches=4, gradient_clip_val=0.1, enable_model_summary=False
    )
    trainer.fit(model, loader, data.to_dataloader(train=False, batch_size=32, num_workers=0))
    raw = model.predict(data.to_dataloader(train=False, batch_size=32), mode="raw", trainer_kwargs=common)
    return [model, raw.prediction, model.interpret_output(raw)]


@client("gluonts", "lightning", "`trainer_kwargs={'strategy': 'superpipeline'}`")
def gluonts(strategy: str) -> Any:
    """DeepAR and a temporal fusion transformer, which sample their forecasts."""
    from gluonts.dataset.common import ListDataset
    from gluonts.torch.model.deepar import DeepAREstimator
    from gluonts.torch.model.tft import TemporalFusionTransformerEstimator

    data = ListDataset([{"start": "2020-01-01", "target": waves() * (i + 1)} for i in range(3)], freq="D")
    trainer = {
        "accelerator": "cpu",
        "strategy": strategy,
        "max_epochs": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    common = {"freq": "D", "prediction_length": 6, "context_length": 24, "batch_size": 8, "num_batches_per_epoch": 3}
    results = []
    for estimator in (
        DeepAREstimator(hidden_size=8, trainer_kwargs=trainer, **common),
        TemporalFusionTransformerEstimator(hidden_dim=8, variable_dim=8, num_heads=2, trainer_kwargs=trainer, **common),
    ):
        predictor = estimator.train(data)
        results += [predictor.prediction_net, [forecast.mean for forecast in predictor.predict(data)]]
    return results
