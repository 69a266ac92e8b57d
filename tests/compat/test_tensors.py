"""Private names around tensors."""

import weakref

import torch
import wrapped
from torch import nn

import sp_lightning.compat.tensors  # noqa: F401
from sp_lightning.compat.modules import convert_tensors


def test_a_weight_that_consists_of_tensors_stays_as_and_where_it_is_in_a_conversion():
    layer = wrapped.quantise(nn.Linear(8, 8), "coded")
    kept = layer.weight
    kept.note = "of the user's"
    reference = weakref.ref(kept)  # beside one torch would not swap it
    convert_tensors(layer, torch.Tensor.double)
    assert layer.weight is kept is reference() and kept.note and layer.bias.dtype == torch.float64
    assert [*dict(layer.named_parameters())] == ["weight", "bias"]
