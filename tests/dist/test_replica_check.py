"""One flipped bit in one rank's copy is found and named; plans without one raise no alarm.

Before `check_replicas` a drifted replica went unnoticed: each rank updates its own copy, and the loss goes down.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.errors import RunFailed, ShoalError
from shoal.models.llama import build as build_llama
from shoal.models.moe import build as build_moe
from shoal.numerics.checksum import checksums
from shoal.numerics.local_tensor import to_local
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.pool import on_ranks

SMALL = {"hidden": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "vocabulary": 32, "max_sequence": 16}


def own_run(world: World, plan: str, **options: Any) -> Run:
    run = Run(plan, world=world, check_replicas=1, **options)
    is_moe = "ep=" in plan
    model: nn.Module = build_moe(**SMALL, expert_ffn=16, num_experts=4) if is_moe else build_llama(**SMALL, ffn=32)
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return run


def one_step(run: Run, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + run.coordinate)
    tokens = torch.randint(0, 32, (4, 9), generator=generator)
    run.step({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})


def flip(tensor: Tensor) -> None:
    """The lowest bit of one number."""
    to_local(tensor).detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1)


@pytest.mark.parametrize(
    "plan",
    [
        wide("dp_replicate=4 zero=0"),
        wide("dp_replicate=2 dp_shard=2 zero=3"),
        wide("dp_replicate=2 tp=2 zero=0"),
        wide("dp_shard=2 tp=2 zero=2"),
        wide("cp=2 dp_replicate=2 zero=0"),
        wide("cp=2 tp=2 zero=0"),
        wide("pp=2 dp_replicate=2 zero=0 mb=2"),
        "ep=2 dp_shard=2 dp_replicate=2 zero=3",
        wide("dp_replicate=4 compress=int8"),
        "dp_replicate=2 dp_shard=2 zero=1 sync=diloco:2",
    ],
)
@on_ranks(4)
def test_copies_that_are_the_same_raise_no_alarm(world: World, plan: str) -> None:
    run = own_run(world, plan, clip=0.5)
    for number in range(3):
        one_step(run, number)
    assert run.replicas_agreed_at == 3


@pytest.mark.parametrize(
    ("plan", "culprit", "what"),
    [
        ("dp_replicate=4 zero=0", 2, "blocks.1.norm.weight: rank 2 differs from ranks 0, 1 and 3"),
        # Each shard has two copies, of which neither is right by majority.
        ("dp_replicate=2 dp_shard=2 zero=3", 2, "blocks.1.norm.weight: ranks 0 and 2 differ"),
        ("tp=2 dp_replicate=2 zero=0", 3, "blocks.1.norm.weight: rank 3 differs from ranks 0, 1 and 2"),
        ("pp=2 dp_replicate=2 zero=0 mb=2", 3, "blocks.1.norm.weight: ranks 2 and 3 differ"),
        # Local SGD replicas train apart, and the ranks of one replica hold copies.
        ("dp_replicate=2 tp=2 zero=0 sync=local:8", 3, "blocks.1.norm.weight: ranks 2 and 3 differ"),
    ],
)
@on_ranks(4)
def test_one_flipped_bit_is_named_with_tensor_and_rank(world: World, plan: str, culprit: int, what: str) -> None:
    run = own_run(world, plan)
    one_step(run, 0)
    name = next(iter(n for n in run.composed.named if n.endswith("norm.weight") and "1" in n), None)
    if world.rank == culprit:
        assert name is not None
        flip(run.composed.named[name])
    told = world.all_gather_object(name)[culprit]
    with pytest.raises(RunFailed) as caught:
        one_step(run, 1)
    text = str(caught.value)
    assert what.replace("blocks.1.norm.weight", told) in text
    assert "after step 2" in text
    assert "the same after step 1" in text
    assert "fix: resume from a checkpoint of step 1 or before" in text


@on_ranks(2, 3)
def test_states_and_statistics_are_compared_too(world: World) -> None:
    def fresh(every: int) -> Run:
        torch.manual_seed(0)
        run = Run("fp32 zero=0", world=world, check_replicas=every)
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
        run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        run.step((torch.randn(4, 3), torch.tensor([0, 1, 1, 0])))
        return run

    ranks = "ranks 0 and 1 differ" if world.size == 2 else "rank 1 differs from ranks 0 and 2"
    for what in ("1.weight", "exp_avg_sq of 1.weight", "0.running_var"):
        run = fresh(0)
        kind, _, name = what.rpartition(" of ")
        tensor = run.module.get_parameter(name) if name == "1.weight" else run.module.get_buffer(name)
        if kind:
            tensor = run.optimizer.state[tensor][kind]
        if world.rank == 1:
            flip(tensor)
        with pytest.raises(RunFailed, match=f"{what}: {ranks}"):
            run.replica_check.compare(run, run.steps_done)
    run = fresh(0)
    if world.rank == 1:
        flip(run.module.get_parameter("1.weight"))
    run.step((torch.randn(4, 3), torch.tensor([0, 1, 1, 0])))  # never compared
    with pytest.raises(ShoalError, match="check_replicas must be a whole number of at least 0, got -1"):
        Run("fp32", world=world, check_replicas=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_a_checksum_sees_every_bit_and_the_order(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 2, (7,), generator=generator).to(dtype)
    x[:2] = torch.tensor([0, 1]).to(dtype)
    original = checksums([x])
    assert original == checksums([x.clone()])
    swapped = x[[1, 0, *range(2, 7)]]
    assert checksums([swapped]) != original
    for place in range(x.numel()):
        for bit in range(8 * x.element_size()):
            if dtype is torch.bool and bit:
                continue
            other = x.clone()
            other.view(torch.uint8).view(7, -1)[place, bit // 8] ^= 1 << bit % 8
            assert checksums([other]) != original, (place, bit)


def test_a_long_tensor_is_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(40, dtype=torch.float32)
    monkeypatch.setattr("shoal.numerics.checksum.CHUNK", 16)
    first = checksums([x, torch.zeros(0), torch.tensor(1.0)])
    swapped = x.clone()
    swapped[[0, 16]] = swapped[[16, 0]]  # the same place of two chunks
    assert checksums([swapped])[0] != first[0]
    assert first[1] == 0
