"""Expert parallelism: your own mixture of experts, of which each token uses two, divided over the ranks.

    python examples/09_moe.py                               # one process has all experts
    torchrun --nproc-per-node 2 examples/09_moe.py          # two ranks, half of the experts on each: the same losses

The model is written for one device. `shoal.Router` chooses, `shoal.Experts` computes, `attach_aux_loss` reports how
busy each expert was, and `describe` names them. Under `ep=2` tokens are sent to the rank that has their expert,
and back.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

VOCABULARY, TOKENS, FEATURES, NUM_HEADS, NUM_BLOCKS, NUM_EXPERTS = 31, 16, 32, 4, 2, 8
DEGREE = int(os.environ.get("WORLD_SIZE", 1))  # all ranks that torchrun has started share the experts


class Enter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, FEATURES)
        self.places = nn.Embedding(TOKENS, FEATURES)

    def forward(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return self.tokens(tokens) + self.places(positions)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
        self.attention = shoal.Attention()  # causal; under cp also over the tokens of other ranks
        self.expert_norm = nn.LayerNorm(FEATURES)
        self.router = shoal.Router(FEATURES, NUM_EXPERTS, top_k=2, auxiliary_coefficient=0.02)
        self.experts = shoal.Experts(FEATURES, 2 * FEATURES, NUM_EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        normed = self.expert_norm(x)
        routing, *facts = self.router(normed)  # the experts of each token; facts: their loads
        y = self.experts(normed.flatten(0, 1), routing).view_as(x)
        return x + self.router.attach_aux_loss(y, *facts)


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = Enter()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.enter(tokens, positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def describe(self) -> shoal.Description:
        return shoal.Description(
            before_blocks=("enter",),
            blocks=tuple(f"blocks.{i}" for i in range(NUM_BLOCKS)),
            after_blocks=("head",),
            splits={"blocks.*.experts": shoal.Split.EXPERTS},  # ep may divide it
            num_experts=NUM_EXPERTS,
            active_experts=2,
            num_heads=NUM_HEADS,
            positions="positions",  # so cp works as well
        )


def sequences(count: int) -> TensorDataset:
    """Each sequence rises by its own stride, which the model has to find from the tokens before."""
    generator = torch.Generator().manual_seed(1)
    start, stride = (torch.randint(1, n, (count, 1), generator=generator) for n in (VOCABULARY, 5))
    whole = (start + stride * torch.arange(TOKENS + 1)) % VOCABULARY
    return TensorDataset(whole[:, :-1], whole[:, 1:])


with shoal.Run(f"ep={DEGREE} zero=1 mb=32", clip=1.0) as run:
    torch.manual_seed(0)
    model = MixtureOfExperts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(sequences(512), batch_size=64, shuffle=True))
    if run.is_main:
        rows = [f"{len(block.experts.up_proj)} of {NUM_EXPERTS * 2 * FEATURES}" for block in run.module.blocks]
        print("rows of up_proj on rank 0, by block:", ", ".join(rows))
    for epoch in range(4):
        losses = [run.step(batch).item() for batch in run.batches(loader)]
        if run.is_main:
            print(f"epoch {epoch}  loss {sum(losses) / len(losses):.4f}", end="")
            loads = run.report.experts[:, :NUM_EXPERTS]  # of the last step: how often each expert was chosen, by block
            for block, load in enumerate(loads):
                print(f"  block {block}: hottest expert {load.argmax()}, {load.max() / load.mean():.2f} x mean", end="")
            print()
