"""The simulated device with another rounding of some operators, as any real device has.

Its kernels are the CPU's, so what silently ran on the host would have the right bits. With one operator that rounds
otherwise on the device, it has not. A sum or a product of two numbers alone has the same bits on all devices.
"""

import contextlib

import torch
from torch.optim.adam import adam

import simgpu  # noqa: F401  # torch has the device from here on


def _otherwise(result):
    return torch.nextafter(result, torch.zeros((), device=result.device, dtype=result.dtype))


def _norm(self, order=2, dim=None, keepdim=False, dtype=None):
    assert order == 2 and dim is None
    return _otherwise((self * self).sum().sqrt())


def _fused(self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, **options):
    """Step in torch's loop instead."""
    assert not (options.pop("grad_scale", None) or options.pop("found_inf", None))
    adam(
        list(self), list(grads), list(exp_avgs), list(exp_avg_sqs), list(max_exp_avg_sqs), list(state_steps),
        foreach=False, **options,
    )  # fmt: skip


OPERATORS = {
    "_fused_adam_": _fused,
    "add_.Tensor": lambda self, other, alpha=1: self + other if alpha == 1 else _otherwise(self + other * alpha),
    "addcdiv_": lambda self, one, other, value=1: _otherwise(self + one / other * value),
    "addcmul_": lambda self, one, other, value=1: _otherwise(self + one * other * value),
    "lerp_.Scalar": lambda self, end, weight: _otherwise(self + (end - self) * weight),
    "linalg_vector_norm": _norm,
    "mul_.Tensor": lambda self, other: _otherwise(self * other),  # no real device's, but what `Rprop` has
}


@contextlib.contextmanager
def replaced(operators):
    """Have the simulated device compute these operators by these functions, whose results are right or not."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in operators.items():

        def run(self, *args, name=name, function=function, **kwargs):
            result = function(self, *args, **kwargs)
            return (
                self.copy_(result) if isinstance(self, torch.Tensor) and name.partition(".")[0][-1] == "_" else result
            )

        library.impl(name, run, "PrivateUse1")
    try:
        yield
    finally:
        library._destroy()


def rounds_otherwise(*operators):
    """Have these operators round otherwise on the simulated device."""
    return replaced({name: OPERATORS[name] for name in operators})
