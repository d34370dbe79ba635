"""A training with Accelerate: torchrun --nproc-per-node 2 examples/migrate/accelerate_before.py"""

import json

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(64, 8)
labels = (inputs.sum(1) > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=24)  # it steps once for each of 2 ranks
loader = DataLoader(TensorDataset(inputs, labels), batch_size=4)  # on each rank
model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)

losses = []
for _ in range(3):
    total = 0.0
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total += accelerator.reduce(loss.detach(), "mean").item() / 2
        if accelerator.sync_gradients:
            losses.append(total)
            total = 0.0
accelerator.save_state("saved")
if accelerator.is_main_process:
    print("losses", json.dumps(losses))
accelerator.end_training()
