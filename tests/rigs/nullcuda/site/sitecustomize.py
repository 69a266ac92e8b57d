"""In every Python process under the null CUDA: what needs a device is not asked, and kernels may get numbers."""

import contextlib
import os
import sys

import torch

sys.modules["torchao"] = None  # transformers imports it where it is, and it asks for the device then: too early to fork
torch.backends.cudnn.enabled = False
if kernels := os.environ.get("NULLCUDA_KERNELS"):
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    with contextlib.suppress(ImportError):
        import torchvision  # noqa: F401  its operators, too
    torch.ops.load_library(kernels)
