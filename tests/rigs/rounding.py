"""The simulated device with another rounding of some operators, as any real device has.

Its kernels are the CPU's, so what silently ran on the host would have the right bits. With one operator that rounds
otherwise on the device, it has not. A sum or a product of two numbers alone has the same bits on all devices.
"""

import contextlib

import torch

import simgpu  # noqa: F401  # torch has the device from here on


def _norm(self, order=2, dim=None, keepdim=False, dtype=None):
    assert order == 2 and dim is None
    result = (self * self).sum().sqrt()
    return torch.nextafter(result, torch.zeros((), device=result.device, dtype=result.dtype))


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


def norms_round_otherwise():
    """Have norms of vectors round otherwise on the simulated device."""
    return replaced({"linalg_vector_norm": _norm})
