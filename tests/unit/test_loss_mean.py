"""`loss_mean="microbatch"` where the head computes the loss, and where it is rejected."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.llama import build
from shoal.train.run import Run
from tests.rejects import rejects


def after_a_step(fused: bool) -> tuple[float, dict[str, Tensor]]:
    tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(0))
    labels = tokens[:, 1:].clone()
    labels[0, :5], labels[3, :7] = -100, -100
    model = build(hidden=16, num_layers=1, num_heads=2, num_kv_heads=2, ffn=32, vocabulary=32, max_sequence=8)
    with Run("mb=1", loss_mean="microbatch", fused_loss=fused) as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        with torch.no_grad():
            logits = run.model(tokens[:, :-1])
        means = [F.cross_entropy(logits[i], labels[i], ignore_index=-100) for i in range(4)]
        loss = run.step({"tokens": tokens[:, :-1], "labels": labels}).item()
        assert abs(loss - torch.stack(means).mean().item()) < 1e-5
        return loss, run.weights()


def test_a_fused_head_divides_by_its_own_microbatch() -> None:
    plain, fused = after_a_step(fused=False), after_a_step(fused=True)
    assert abs(plain[0] - fused[0]) < 1e-5
    for name, tensor in plain[1].items():
        torch.testing.assert_close(fused[1][name], tensor, rtol=1e-4, atol=1e-5)


def test_it_needs_whole_sequences() -> None:
    with rejects("E017", "cp=2"):
        Run("cp=2 mb=1", loss_mean="microbatch")
    with rejects("R047", "loss_mean", "microbatch"):
        Run(loss_mean="tokens")  # type: ignore[arg-type]
