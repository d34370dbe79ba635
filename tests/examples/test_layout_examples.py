"""The examples of sharding, pipelines and tensor parallelism run as a person would start them, and keep their word."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.examples.host import run_for_real
from tests.readme.fork_host import Ran


def sharding() -> Ran:
    return run_for_real("03_fsdp.py", timeout=110)


def several_hosts() -> Ran:
    return run_for_real("05_multi_node.py", timeout=110)


def pipeline() -> Ran:
    return run_for_real("07_pipeline.py", timeout=110)


def losses_in(line: str) -> list[float]:
    """Every number with four digits behind the point.

    >>> losses_in("losses 2.6031 0.5197")
    [2.6031, 0.5197]
    """
    return [float(number) for number in re.findall(r"\d+\.\d{4}\b", line)]


@pytest.mark.wide
def test_what_does_not_fit_replicated_trains_sharded(once: Callable[..., Any]) -> None:
    ran = once(sharding)
    assert ran.code == 0, ran.stderr[-3000:]
    first, failure, second, counted, losses = ran.stdout.splitlines()
    limit = 128  # MiB
    assert (first, second) == tuple(
        f"{plan}: 4 ranks with {limit} MiB each" for plan in ("dp_replicate=4", "dp_shard=4 zero=3")
    )
    assert "does not fit" in failure
    assert "tried to allocate" in failure
    held = {cause: float(size) for cause, size in re.findall(r"(\w+) ([\d.]+) MiB", counted)}
    # Twelve blocks of a norm and two linear layers, and the head, in float32; a quarter of it on each of four ranks.
    num_parameters = 12 * (2 * 320 + 320 * 1280 + 1280 + 1280 * 320 + 320) + 320 * 10 + 10
    quarter = num_parameters * 4 / 2**20 / 4
    expected = {"parameters": quarter, "gradients": quarter, "optimizer": 2 * quarter}
    assert held == pytest.approx(expected, rel=0.01)  # dim 0 of every tensor is filled up to a multiple of four
    assert 4 * sum(held.values()) > limit  # it would not fit on one rank, and not for want of room for anything else
    assert losses_in(losses) == sorted(losses_in(losses), reverse=True)
    assert losses_in(losses)[-1] < 0.1 * losses_in(losses)[0]


@pytest.mark.wide
def test_two_hosts_train_one_run(once: Callable[..., Any]) -> None:
    ran = once(several_hosts)
    assert ran.code == 0, ran.stderr[-3000:]
    first, second = ran.stdout.splitlines()
    assert re.fullmatch(r"2 ranks on (shoal-a:1,shoal-b:1|127.0.0.1:1,127.0.0.2:1) made 5 steps", first)
    assert re.fullmatch(r"loss 5\.\d{4} at the first step; step 5 is saved", second)


@pytest.mark.wide
def test_a_pipeline_equals_one_process_under_two_schedules(once: Callable[..., Any]) -> None:
    ran = once(pipeline)
    assert ran.code == 0, ran.stderr[-3000:]
    one_f_one_b, zero_bubble, alone = ran.stdout.strip().split("\n\n")
    assert one_f_one_b.startswith("pp=2 1f1b mb=2: 14% waiting (predicted), in flight (2.0, 1.0)\nrank 0 │0   1   ....")
    assert zero_bubble.startswith("pp=2 zbv mb=2: 3% waiting (predicted), in flight (2.0, 2.0)\nrank 0 │0 1 2 0'")
    expected = losses_in(alone)
    assert len(expected) == 5
    assert expected[-1] < 0.6 * expected[0]
    for part in (one_f_one_b, zero_bubble):
        assert losses_in(part) == pytest.approx(expected, abs=2e-4)
        worst = re.search(r"equal to one process: True, gradients differ by (\S+) at most", part)
        assert worst is not None
        assert float(worst[1]) < 1e-12


def test_layers_split_by_description_or_by_hand_compute_what_whole_ones_do(
    one_and_two: Callable[[str], tuple[str, str]],
) -> None:
    whole, split = one_and_two("08_tensor_parallel.py")
    described, by_hand = (losses_in(line) for line in whole.splitlines()[1::2])
    assert described == by_hand
    assert described[-2] < 0.5 * described[0]
    # float32 is rounded in another order. The last number is the gradient norm, in which every piece must be counted.
    assert losses_in(split) == pytest.approx([*described, *by_hand], abs=2e-4)
    shapes = [re.findall(r"(\S+) \((\d+), (\d+)\)", line) for line in split.splitlines()[::2]]
    up, down = ("blocks.0.up", "64", "32"), ("blocks.0.down", "32", "64")
    assert shapes[0] == [("embedding", "15", "32"), up, down, ("head", "15", "32")]  # of 29 rows
    assert shapes[1] == [("embedding", "29", "32"), up, down, ("head", "29", "32")]
