"""Host memory in plain numbers, before a run."""

import pytest
import torch
from torch import nn

from sp_lightning.host.unit_numbers import STATES, HostBytes, UnitHostBytes, host_bytes, state_nbytes

MIB = 2**20


def linear(**options):
    return nn.Linear(1024, 256, bias=False, device="meta", **options)  # 1 MiB in FP32


def half(dtype):
    return torch.bfloat16 if dtype is torch.float32 else dtype


def test_fp32_with_adamw_takes_16_bytes_per_parameter():
    units = [UnitHostBytes.of(linear().parameters()) for _ in range(3)]
    found = host_bytes(units, states=STATES["AdamW"])
    assert found == HostBytes(weights=3 * MIB, gradients=3 * MIB, optimizer=6 * MIB)
    assert found.total == 16 * 3 * 256 * 1024


def test_what_travels_in_half_precision_takes_2_bytes_more():
    unit = UnitHostBytes.of(linear().parameters(), half)
    assert host_bytes([unit], states=2).total == 18 * 256 * 1024


def test_frozen_weights_take_themselves_only():
    unit = UnitHostBytes.of(linear().requires_grad_(False).parameters())
    assert host_bytes([unit], states=2) == HostBytes(weights=MIB)


def test_inference_takes_no_gradients_and_no_state():
    unit = UnitHostBytes.of(linear().parameters())
    assert host_bytes([unit], states=2, training=False) == HostBytes(weights=MIB)


def test_each_parameter_begins_at_an_aligned_offset():
    assert UnitHostBytes.of([torch.empty(1), torch.empty(129)]).weights == 512 + 1024


HALVES = [UnitHostBytes.of(linear().parameters(), half) for _ in range(3)]


def test_ranks_share_weights_gradients_and_state_and_have_the_rest_each():
    found = host_bytes(HALVES, states=2, activations=5, ring=7).of_ranks(4, MIB)
    assert found == HostBytes(
        weights=3 * MIB,
        wire=4 * 3 * MIB // 2,
        gradients=3 * MIB,
        optimizer=6 * MIB,
        activations=20,
        under_way=4 * MIB,
        ring=28,
    )


def test_ranks_that_accumulate_have_gradients_beside_the_mean():
    assert host_bytes(HALVES, states=2).of_ranks(2, MIB, own_gradients=True).gradients == 3 * 3 * MIB


def test_what_every_rank_steps_has_weights_and_state_on_every_rank():
    found = host_bytes(HALVES, states=2).of_ranks(2, MIB, shared_state=False)
    assert (found.weights, found.optimizer) == (3 * 3 * MIB, 2 * 6 * MIB)


def test_the_number_of_states_is_what_the_optimizers_make():
    for name, states in STATES.items():
        parameter = nn.Parameter(torch.ones(8))
        optimizer = getattr(torch.optim, name)([parameter], lr=0.1)
        parameter.grad = torch.ones(8)
        optimizer.step()
        made = [t for t in optimizer.state[parameter].values() if isinstance(t, torch.Tensor) and t.shape == (8,)]
        assert len(made) == states, name


@pytest.mark.parametrize(
    "name, options",
    [
        *((name, {}) for name in STATES),
        ("SGD", {"momentum": 0.9}),
        ("AdamW", {"amsgrad": True}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
    ],
)
def test_state_is_known_of_the_optimizers_of_torch(name, options):
    parameter, frozen = nn.Parameter(torch.ones(128)), nn.Parameter(torch.ones(128), requires_grad=False)
    optimizer = getattr(torch.optim, name)([parameter, frozen], lr=0.1, **options)
    told = state_nbytes(optimizer)
    parameter.grad = torch.ones(128)
    optimizer.step()
    assert told == sum(t.nbytes for t in optimizer.state[parameter].values() if t is not None and t.dim())


def test_state_of_adafactor_is_that_of_rows_and_columns():
    shapes = [(128,), (128, 256), (1024, 128, 3, 3), (128, 128, 1, 1), (256, 128, 1)]
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = torch.optim.Adafactor(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    told, shaped = state_nbytes(optimizer), state_nbytes(optimizer, shaped=True)
    optimizer.step()
    made = [(p, t) for p in parameters for t in optimizer.state[p].values() if isinstance(t, torch.Tensor) and t.dim()]
    assert told == sum(tensor.nbytes for _, tensor in made)
    assert shaped == sum(tensor.nbytes for parameter, tensor in made if tensor.shape == parameter.shape) > 0
    assert state_nbytes(optimizer, {id(parameters[0])}) == 512


def test_state_of_another_optimizer_is_not_known():
    class AdamW(torch.optim.AdamW):
        pass

    assert state_nbytes(AdamW([nn.Parameter(torch.ones(1))])) is None
