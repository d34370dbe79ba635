"""Means over replicas, exact and compressed: their values, their residuals, and their bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.blueprint.replicas.compress_words import Compression
from shoal.comm.compression.codecs import SIGN_BLOCK, codec_of
from shoal.comm.compression.gradient_compression import Bucket, Seeds, build_average
from shoal.comm.replicas.transport import Transport
from shoal.comm.world import World
from tests.dist.pool import on_ranks

SHAPES = [(40, 30), (7,), (3, 4, 5), (64, 48)]
SIZE = sum(torch.Size(shape).numel() for shape in SHAPES)
EVERY = ["fp16", "bf16", "int8", "1bit", "topk:0.01", "topk:0.2", "randomk:0.1", "powersgd:1", "powersgd:4"]
CPU = torch.device("cpu")


def gradient(rank: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Of sizes that differ from place to place, as those of a model do."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    drawn = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    return (drawn * torch.logspace(-4, 1, SIZE, dtype=torch.float64)).to(dtype)


def mean(world: World, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.stack([gradient(rank, step, dtype) for rank in range(world.size)]).mean(0)


def transport_of(world: World) -> Transport:
    return Transport(world.control_group, CPU)


class Averaged:
    """One method over several steps."""

    def __init__(self, world: World, method: str | None, dtype: torch.dtype = torch.float64) -> None:
        self.world, self.dtype = world, dtype
        self.average = build_average(None if method is None else Compression.parse(method))
        self.bucket: Bucket = self.average.new_bucket(SHAPES, dtype, CPU, list(range(len(SHAPES))))
        self.transport = transport_of(world)

    def step(self, number: int) -> Tensor:
        x = gradient(self.world.rank, number, self.dtype)
        self.average(x, self.bucket, self.transport, Seeds(number, 1000 * number + self.world.rank))
        return x

    def owed(self) -> Tensor:
        """The mean over ranks of what was not sent."""
        total = torch.zeros(SIZE, dtype=self.dtype) if self.bucket.residual is None else self.bucket.residual.clone()
        return self.transport.all_reduce(total) / self.world.size


def assert_same_everywhere(world: World, x: Tensor) -> None:
    first, *others = world.all_gather_object(x)
    assert all(torch.equal(first, other) for other in others)


@on_ranks(2, 3, 4)
def test_all_replicas_hold_the_same_bits(world: World) -> None:
    for method in (None, *EVERY):
        averaged = Averaged(world, method, torch.float32)
        for step in range(3):
            assert_same_everywhere(world, averaged.step(step))


@on_ranks(2, 3, 4)
def test_without_compression_it_is_the_mean(world: World) -> None:
    assert torch.allclose(Averaged(world, None).step(0), mean(world, 0), rtol=1e-13, atol=1e-15)


@on_ranks(2, 3, 4)
def test_nothing_is_lost_with_feedback(world: World) -> None:
    """What has arrived until now and what is owed are together all that there was."""
    for method in ("1bit", "topk:0.01", "powersgd:1", "powersgd:4"):
        averaged = Averaged(world, method)
        arrived, due = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
        for step in range(5):
            arrived += averaged.step(step)
            due += mean(world, step)
            assert torch.allclose(arrived + averaged.owed(), due, rtol=1e-10, atol=1e-12), (method, step)
        assert not torch.allclose(arrived, due, rtol=0.1), method  # else nothing would have been owed


@on_ranks(2, 3)
def test_how_far_narrow_numbers_are_off(world: World) -> None:
    largest = torch.stack([gradient(rank, 0) for rank in range(world.size)]).abs().amax(0)
    for method, bits in (("bf16", 8), ("fp16", 11)):
        error = (Averaged(world, method).step(0) - mean(world, 0)).abs()
        assert (error <= largest * 2.0 ** -(bits - 1) + 1e-7).all(), method
        assert error.sum() > 0
    error = (Averaged(world, "int8").step(0) - mean(world, 0)).abs()
    assert error.max() <= 2 * largest.max() / 127
    assert error.sum() > 0


@on_ranks(2)
def test_unbiased_methods_are_right_on_average(world: World) -> None:
    """The error of a mean over n draws shrinks with the root of n; that of a biased method would not."""
    for method, draws in (("int8", 100), ("randomk:0.2", 250)):
        averaged = Averaged(world, method)
        errors = []
        total = torch.zeros(SIZE, dtype=torch.float64)
        for draw in range(draws):
            x = gradient(world.rank, 0)
            averaged.average(x, averaged.bucket, averaged.transport, Seeds(draw, 1000 * draw + world.rank))
            total += x - mean(world, 0)
            if draw in (0, draws - 1):
                errors.append(float((total / (draw + 1)).norm()))
        assert errors[1] < errors[0] * 2 / draws**0.5, method


@on_ranks(2, 3)
def test_powersgd_is_exact_where_the_rank_suffices(world: World) -> None:
    """Gradients of one narrow space, in which the first step has found its way."""
    generator = torch.Generator().manual_seed(5)
    left, right = torch.randn(40, 2, generator=generator).double(), torch.randn(2, 30, generator=generator).double()
    average = build_average(Compression.parse("powersgd:2"))
    bucket = average.new_bucket([(40, 30)], torch.float64, CPU, [0])
    for step in range(2):
        x = ((world.rank + 1.0) * left @ right).view(-1)
        average(x, bucket, transport_of(world), Seeds(step, step))
    expected = (left @ right).view(-1) * (world.size + 1) / 2
    assert torch.allclose(x, expected, rtol=1e-10, atol=1e-10)


@on_ranks(2, 3, 4)
def test_bytes_are_as_predicted(world: World) -> None:
    """Also of sizes that neither blocks nor ranks divide, in which something is filled up."""
    for shapes, dtype in (([(64, 256), (4096,), (128, 96)], torch.float32), ([(61, 37), (5,), (2, 3)], torch.float64)):
        size = sum(torch.Size(shape).numel() for shape in shapes)
        for method in EVERY:
            compression = Compression.parse(method)
            average, transport = build_average(compression), transport_of(world)
            bucket = average.new_bucket(shapes, dtype, CPU, [1, 2, 3])
            average(torch.randn(size, dtype=dtype), bucket, transport, Seeds(0, world.rank))
            predicted = compression.bytes_sent(shapes, world.size, dtype.itemsize)
            assert transport.sent.bytes == predicted, (method, shapes, transport.sent.bytes, predicted)


@on_ranks(2)
def test_a_gradient_that_is_not_finite_is_told_and_not_kept(world: World) -> None:
    for method in ("fp16", "bf16", "int8", "1bit", "topk:0.01", "randomk:0.1", "powersgd:4"):
        for bad in (float("nan"), float("inf")):
            averaged = Averaged(world, method, torch.float32)
            x = gradient(world.rank, 0, torch.float32)
            x[17] = bad if world.rank == 0 else x[17]
            averaged.average(x, averaged.bucket, averaged.transport, Seeds(0, world.rank))
            assert not x.isfinite().all(), (method, bad)
            assert averaged.step(1).isfinite().all(), (method, bad)


@on_ranks(3)
def test_lists_of_messages_carry_what_torch_carries(world: World) -> None:
    for method in (None, "int8", "powersgd:4"):
        builtin, ring = Averaged(world, method), Averaged(world, method)
        ring.transport.algorithm = "ring"
        for step in range(2):
            assert torch.allclose(ring.step(step), builtin.step(step), rtol=1e-12, atol=1e-14)
        assert ring.transport.sent.bytes == pytest.approx(builtin.transport.sent.bytes, rel=0.01)


@on_ranks(2)
def test_one_replica_owes_what_it_could_not_send(world: World) -> None:
    """With one bit a number, the largest number of a block is still owed in part, and paid back step by step."""
    averaged = Averaged(world, "1bit")
    total = torch.zeros(SIZE, dtype=torch.float64)
    errors = []
    for step in range(1, 65):
        x = gradient(world.rank, 0)
        averaged.average(x, averaged.bucket, averaged.transport, Seeds(step, step))
        total += x
        errors.append(float((total / step - mean(world, 0)).norm()))
    assert errors[-1] < errors[0] / 3


@on_ranks(2, 3)
def test_no_method_is_further_off_than_it_promises(world: World) -> None:
    own = torch.stack([gradient(rank, 0) for rank in range(world.size)])
    size = float((own.norm(dim=1) ** 2).mean().sqrt())
    for method in EVERY:
        bound = Compression.parse(method).error_bound
        error = float((Averaged(world, method).step(0) - mean(world, 0)).norm()) / size
        assert 0 < error <= bound, (method, error, bound)


@on_ranks(4)
def test_the_bound_of_bf16_is_one(world: World) -> None:
    """Numbers that are rounded as far as numbers can be, all in one direction."""
    x = torch.full((4096,), 1 - 0.01 / 128 if world.rank == 0 else 1 + 2.5 / 128, dtype=torch.float64)
    exact = (1 - 0.01 / 128 + 3 * (1 + 2.5 / 128)) / 4
    compression = Compression.parse("bf16")
    average = build_average(compression)
    average(x, average.new_bucket([(4096,)], torch.float64, CPU, [0]), transport_of(world), Seeds(0, 0))
    error = float((x - exact).abs().max())
    assert 2.0**-9 < error <= compression.error_bound


def test_one_bit_is_a_sign_and_a_scale_the_mean_size() -> None:
    """Feedback makes up for a decoder that is wrong, and a bound leaves room for one: here are its numbers."""
    codec = codec_of(Compression.parse("1bit"))
    x = torch.tensor([3.0, -1.0] * (SIGN_BLOCK // 2))
    assert torch.equal(codec.decode(codec.encode(x, torch.Generator()), torch.float64), 2 * x.double().sign())
