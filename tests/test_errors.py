import pickle

import pytest
import torch

from sp_lightning import errors
from sp_lightning.host.device import DeviceMemoryError


def test_an_option_error_names_argument_found_and_allowed():
    error = errors.OptionError(argument="window", found=0, allowed="an int >= 1 or 'auto'")
    assert str(error) == "window must be an int >= 1 or 'auto', got 0"


def test_an_option_error_quotes_text_that_was_found():
    error = errors.OptionError(argument="window", found="big", allowed="an int")
    assert str(error) == "window must be an int, got 'big'"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_option_error_survives_pickling_whatever_was_found(protocol):
    error = errors.OptionError(argument="units", found=lambda module: [], allowed="names")
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is errors.OptionError
    assert (str(again), again.argument, again.found, again.allowed) == (str(error), "units", error.found, "names")


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.PartitionError, ValueError),
        (errors.MemoryBudgetError, RuntimeError),
        (DeviceMemoryError, torch.OutOfMemoryError),
        (errors.UnsupportedError, RuntimeError),
        (errors.ExactnessError, RuntimeError),
        (errors.SourceFileError, RuntimeError),
        (errors.HalfAppliedStepError, RuntimeError),
        (errors.MeasurementError, RuntimeError),
    ],
)
def test_every_error_is_ours_and_a_builtin_and_survives_pickling(kind, builtin):
    again = pickle.loads(pickle.dumps(kind("in layers.3: why")))
    assert type(again) is kind
    assert isinstance(again, errors.SuperpipelineError)
    assert isinstance(again, builtin)
    assert str(again) == "in layers.3: why"


def test_an_option_error_is_ours_and_a_value_error():
    assert issubclass(errors.OptionError, errors.SuperpipelineError)
    assert issubclass(errors.OptionError, ValueError)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_missing_extra_says_what_to_install_and_can_be_pickled(protocol):
    error = errors.MissingExtraError(feature="a picture", package="matplotlib", extra="plots")
    again = pickle.loads(pickle.dumps(error, protocol))
    assert isinstance(again, ImportError) and isinstance(again, errors.SuperpipelineError)
    assert str(again) == "a picture needs matplotlib, which is not installed: pip install 'sp-lightning[plots]'"
