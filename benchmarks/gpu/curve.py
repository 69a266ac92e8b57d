"""Memory against time for k = 1 .. all and k' = 1 .. 4: the paper's trade-off, as a picture.

python benchmarks/gpu/curve.py [--model llama-1b|llava-1b|vit-h] [--minutes 9]
"""

from __future__ import annotations

import sys

import campaign
from measured import Comparison, others, ours, run_all

from sp_lightning.bench import Entry
from sp_lightning.errors import MissingExtraError

MODELS = {"llama-1b": {"batch": 4, "seq": 2048}, "llava-1b": {"batch": 4, "seq": 2048}, "vit-h": {"batch": 64}}
WINDOWS = (1, 2, 3, 4, 8, 12)
TRANSFERS = (1, 2, 4)


def rows() -> list[Entry]:
    """All pairs that there are."""
    made = [row for k in TRANSFERS for row in ours(*(window for window in WINDOWS if window >= k), transfer=k)]
    return [*others("plain"), *made, *ours("all")]


def curve(model: str, work: dict[str, int]) -> Comparison:
    setting = {**work, "model": model, "precision": "bf16-mixed", "optimizer": "adamw", "steps": 3, "repetitions": 1}
    return Comparison(f"{model}, all windows", setting, rows())


def draw(run: campaign.Campaign, path: str) -> None:
    """A line for each transfer in each model."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError(feature="a picture of the curves", package="matplotlib", extra="plots") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    results = [result for result in run.results if "rows" in result]
    figure, axes = pyplot.subplots(1, max(1, len(results)), figsize=(5 * max(1, len(results)), 4), squeeze=False)
    for place, result in zip(axes[0], results, strict=False):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in result["rows"]:
            if row["step_s"] is not None:
                peak = (row["device_peak"] if row["device_peak"] is not None else row["host_peak"]) / 2**30
                name = f"k' = {row['options'].get('transfer', 'all')}" if row["options"] else row["contender"]
                lines.setdefault(name, []).append((row["step_s"]["median"] * 1e3, peak))
        for name, points in lines.items():
            place.plot(*zip(*sorted(points), strict=True), "o-", label=name)
        place.set(
            title=result["label"], xlabel="ms per step", ylabel="peak memory, GiB", xlim=(0, None), ylim=(0, None)
        )
        place.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = campaign.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, action="append", help="which (default: all)")
    parser.add_argument("--plot", metavar="FILE", help="draw it")
    options = parser.parse_args()
    run = campaign.Campaign("curve", options)
    status = run_all(run, [curve(model, MODELS[model]) for model in options.model or MODELS])
    if options.plot:
        draw(run, options.plot)
    return status


if __name__ == "__main__":
    sys.exit(main())
