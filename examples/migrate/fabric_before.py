"""A training with Lightning Fabric: torchrun --nproc-per-node 2 examples/migrate/fabric_before.py"""

import json

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(64, 8)
labels = (inputs.sum(1) > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=12)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(inputs, labels), batch_size=4))  # on each rank

losses = []
for _ in range(3):
    total = 0.0
    for i, (x, y) in enumerate(loader):
        is_accumulating = i % 2 == 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = F.cross_entropy(model(x), y) / 2
            fabric.backward(loss)
        total += fabric.all_reduce(loss.detach(), reduce_op="mean").item()
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(total)
            total = 0.0
fabric.save("saved.ckpt", {"model": model, "optimizer": optimizer})
if fabric.is_global_zero:
    print("losses", json.dumps(losses))
