"""How fast collectives by name are, against torch.distributed in the same processes.

    shoal run -np 2 python benchmarks/horovod/run.py

Rounds alternate, and ratios compare the two halves of one round. Rank 0 prints medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import shoal.horovod as hvd

ROUNDS = 9


def main() -> None:
    hvd.init()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    large, small = torch.ones(25 * 2**20 // 4, device=device), torch.ones(16, device=device)
    many = [torch.ones(1000, device=device) for _ in range(100)]
    say(f"{hvd.size()} ranks, {device.type}, {dist.get_backend()}, torch {torch.__version__}")
    in_place = lambda: hvd.allreduce_(large, name="large", op=hvd.Sum)  # noqa: E731
    compare("25 MiB, in place", in_place, lambda: dist.all_reduce(large), 3)
    compare("25 MiB, a new tensor", lambda: hvd.allreduce(large, op=hvd.Sum), lambda: dist.all_reduce(large.clone()), 3)
    compare("64 bytes", lambda: hvd.allreduce_(small, name="small", op=hvd.Sum), lambda: dist.all_reduce(small), 50)
    compare("100 tensors of 4 kB", lambda: all_by_name(many), lambda: all_in_order(many), 3)
    overlap(device)
    hvd.shutdown()


def compare(what: str, ours: Callable[[], object], torchs: Callable[[], object], repeats: int) -> None:
    rounds = [(timed(ours, repeats), timed(torchs, repeats)) for _ in range(ROUNDS)]
    mine, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(a / b for a, b in rounds)
    say(f"{what:24} {mine * 1e3:9.3f} ms   torch.distributed {theirs * 1e3:9.3f} ms   ratio {ratio:.2f}")


def timed(function: Callable[[], object], repeats: int) -> float:
    hvd.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def all_by_name(tensors: list[torch.Tensor]) -> None:
    handles = [hvd.allreduce_async_(tensor, name=f"t{index}", op=hvd.Sum) for index, tensor in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)


def all_in_order(tensors: list[torch.Tensor]) -> None:
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()


def overlap(device: torch.device) -> None:
    """How much of the reduction of gradients is hidden behind the backward pass."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).to(device)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    batch = torch.randn(512, 1024, device=device)
    gradients = [torch.ones_like(parameter) for parameter in model.parameters()]

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    def compute() -> None:
        model.zero_grad()
        torch.autograd.grad(model(batch).sum(), list(model.parameters()))

    rounds = [(timed(step, 2), timed(compute, 2), timed(lambda: all_by_name(gradients), 2)) for _ in range(ROUNDS)]
    whole, alone, reduction = (statistics.median(column) for column in zip(*rounds, strict=True))
    hidden = statistics.median((b + c - a) / c for a, b, c in rounds)
    say(
        f"{'step of 33 MB gradients':24} {whole * 1e3:9.3f} ms   computation {alone * 1e3:.3f} ms,"
        f" reduction {reduction * 1e3:.3f} ms: {hidden:.0%} of the reduction is hidden"
    )


def say(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
