"""The same training with shoal: torchrun --nproc-per-node 2 examples/migrate/accelerate_after.py"""

import json

import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal

torch.manual_seed(0)
inputs = torch.randn(64, 8)
labels = (inputs.sum(1) > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

run = shoal.Run("mb=4", clip=1.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=12)  # it steps once for each update
loader = DataLoader(TensorDataset(inputs, labels), batch_size=16)  # on all ranks and microbatches together
model, optimizer, schedule, loader = run.prepare(model, optimizer, schedule, loader)

losses = []
for _ in range(3):
    for batch in run.batches(loader):
        loss = run.step(batch)  # cross-entropy of all 16, clipping and update
        schedule.step()
        losses.append(loss.item())
run.save("saved")
if run.is_main:
    print("losses", json.dumps(losses))
run.close()
