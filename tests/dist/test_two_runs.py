"""Two models with an optimizer each, as of a GAN: a run for each, on the same ranks, computes what one device does. And
a loop that ends early."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.comm.world import World
from shoal.train.run import Run
from tests.dist.pool import Pool

BATCH = 4


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(*(torch.randn(12, size, generator=generator, dtype=torch.float64) for size in (5, 3)))


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    return generator, nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def optimizers(generator: nn.Module, critic: nn.Module) -> tuple[SGD, SGD]:
    """That of the critic has two groups, with learning rates of their own."""
    groups = [{"params": critic[0].parameters(), "lr": 0.2}, {"params": critic[2].parameters()}]  # type: ignore[index]
    return SGD(generator.parameters(), lr=0.3), SGD(groups, lr=0.1)


def loss_of_critic(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    return (critic(fake.detach()) - critic(real)).mean()


def on_one_device() -> dict[str, Tensor]:
    generator, critic = networks()
    of_generator, of_critic = optimizers(generator, critic)
    for real, noise in DataLoader(data(), batch_size=BATCH):
        of_critic.zero_grad()
        loss_of_critic(critic, real, generator(noise)).backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        of_generator.step()
    return {**dict(generator.named_parameters(prefix="g")), **dict(critic.named_parameters(prefix="c"))}


def in_two_runs(world: World, plan: str) -> dict[str, Tensor]:
    run = Run(f"fp64 {plan}", world=world)
    other = Run(f"fp64 {plan}", world=world)
    generator, critic = networks()
    of_generator, of_critic = optimizers(generator, critic)
    critic, of_critic, loader = run.prepare(critic, of_critic, DataLoader(data(), batch_size=BATCH))
    generator, of_generator = other.prepare(generator, of_generator)
    for real, noise in run.batches(loader):
        run.backward(loss_of_critic(critic, real, generator(noise)))
        run.update()
        other.backward(-critic(generator(noise)).mean())
        other.update()
        of_critic.zero_grad()  # the loss of the generator has a gradient for the critic, too
    named = {"g": other.weights(), "c": run.weights()}
    return {f"{prefix}.{name}": weight for prefix, weights in named.items() for name, weight in weights.items()}


@pytest.mark.parametrize("plan", ["zero=0", "zero=3"])
def test_a_generator_and_its_critic(pool: Pool, plan: str) -> None:
    found = pool.run(in_two_runs, 2, plan)[0]
    for name, expected in on_one_device().items():
        torch.testing.assert_close(found[name], expected.detach(), rtol=1e-12, atol=1e-12)


def stopped_early(world: World, folder: Path) -> tuple[int, float, int]:
    """Rank 1 alone sees a reason to stop after two of three steps; then the loop continues with the next epoch."""
    run = Run("fp64 tp=2", world=world)
    model = nn.Sequential(shoal.ColumnParallelLinear(5, 8, tensor=run.tensor, gather_output=True))
    _, _, loader = run.prepare(model, SGD(model.parameters(), lr=0.1), DataLoader(labelled(), batch_size=BATCH))
    for batch in run.batches(loader):
        run.step(batch)
        if run.any(world.rank == 1 and run.steps_done == 2):
            break
    stopped_at, loss = run.steps_done, run.evaluate([batch])
    run.save(folder)
    for batch in run.batches(loader):
        run.step(batch)
    return stopped_at, loss, run.steps_done


def labelled() -> TensorDataset:
    inputs, _ = data().tensors
    return TensorDataset(inputs, torch.arange(12) % 8)


def test_a_reason_to_stop_that_one_rank_sees(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(stopped_early, 2, tmp_path)
    assert first == second
    assert (first[0], first[2]) == (2, 5)
