"""In every Python process under the null CUDA: cuDNN, whose plans need a device, is not asked."""

import torch

torch.backends.cudnn.enabled = False
