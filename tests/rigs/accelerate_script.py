"""A loop with accelerate for two processes: ``python accelerate_script.py FILE``. The weights go into this file."""

import sys
import time

import accelerate
import torch
from safetensors.torch import save_file
from torch import nn

run = accelerate.Accelerator(cpu=True)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
model, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False))
assert run.num_processes == 2
for step in range(3):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + run.process_index))
    run.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
print(type(model).__name__)
if run.is_main_process:
    time.sleep(6)  # the other one has ended
    save_file({name: value.clone() for name, value in run.unwrap_model(model).state_dict().items()}, sys.argv[1])
