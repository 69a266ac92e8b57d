"""The command line: Lightning's own, with superpipeline as the strategy unless another is named."""

import argparse
import importlib.metadata
import importlib.util
from collections.abc import Sequence

COMMANDS = {
    "fit": "train a LightningModule, with validation",
    "validate": "run one evaluation epoch over the validation set",
    "test": "run one evaluation epoch over the test set",
    "predict": "run inference on a dataset",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; without ``arguments``, the one that the process was started with."""
    parser = _parser()
    # What follows the command is LightningCLI's to read, from its own parser.
    command = parser.parse_known_args(arguments)[0].command
    if importlib.util.find_spec("jsonargparse") is None:
        parser.error(f"{command} needs jsonargparse, which is not installed: pip install 'sp-lightning[cli]'")
    _run_lightning(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sp_lightning",
        description="Train, validate and predict with LightningModules larger than the accelerator's memory.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=importlib.metadata.version("sp-lightning"))
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="command",
        title="commands",
        description="LightningCLI's, with strategy superpipeline unless another is named; COMMAND --help for options.",
    )
    for name, what in COMMANDS.items():
        commands.add_parser(name, help=what, add_help=False)
    return parser


def _run_lightning(arguments: Sequence[str] | None) -> None:
    from lightning.pytorch.cli import LightningCLI  # needs the extra

    LightningCLI(
        args=None if arguments is None else list(arguments),
        trainer_defaults={"strategy": "superpipeline"},
        parser_kwargs={"prog": "python -m sp_lightning"},
    )
