"""The schedules on paper are torch's own: the same actions in the same order, as listed and as run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from shoal.blueprint.plan import VIRTUAL_STAGES, Schedule
from shoal.blueprint.schedules.schedule_orders import check_schedule, make_schedule
from shoal.comm.world import World
from shoal.parallel.pipeline.torch_stages import TorchStage
from tests.dist.pool import on_ranks

SINGLE: dict[Schedule, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI: dict[Schedule, Any] = {
    "looped": ScheduleLoopedBFS,
    "interleaved": ScheduleInterleaved1F1B,
    "zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class StandIn:
    """What a schedule asks of a stage in order to plan, and a record of what it then makes the stage compute.

    A real stage would bring a process group of the size in question; the order does not depend on it.
    """

    is_first = is_last = False
    submod = None

    def __init__(self, index: int, *, num_stages: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.group_size, self.group_rank = num_ranks, index % num_ranks
        self.ran: list[str] = []

    def forward_one_chunk(self, microbatch: int, *args: Any, **options: Any) -> None:
        self.ran.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, *args: Any, **options: Any) -> None:
        self.ran.append(f"{self.stage_index}B{microbatch}")

    def no_messages(self, *args: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages
    perform_reduce_grad = clear_runtime_states = no_messages


def sizes(word: Schedule) -> list[tuple[int, int, int]]:
    """(p, v, m): every legal one of a grid that has uneven rounds and fewer microbatches than stages in it."""
    virtual = (VIRTUAL_STAGES[word],) if word in VIRTUAL_STAGES else (1, 2, 3)
    grid = [(p, v, m) for p in (1, 2, 3, 4, 6, 8) for v in virtual for m in range(1, 2 * p + 7)]
    return [(p, v, m) for p, v, m in grid if not check_schedule(word, num_ranks=p, v=v, num_microbatches=m)]


@pytest.mark.parametrize("word", MULTI)
def test_torch_lists_the_same_order(word: Schedule) -> None:
    assert len(sizes(word)) >= 40
    for p, v, m in sizes(word):
        table = make_schedule(word, num_ranks=p, v=v, num_microbatches=m)
        theirs = MULTI[word]([StandIn(0, num_stages=p * v, num_ranks=p) for _ in range(v)], m)
        for rank in range(p):
            order = [str(action) for action in theirs.pipeline_order[rank] if action and action.is_compute_op]
            assert order == [str(slot) for slot in table.order(rank)], f"{word} p={p} v={v} m={m} rank {rank}"
        assert tuple(theirs.stage_index_to_group_rank[stage] for stage in range(p * v)) == table.stage_rank


@pytest.mark.parametrize("word", SINGLE)
def test_torch_runs_the_same_order_on_one_stage_per_rank(word: Schedule) -> None:
    """What it runs and not what it lists: for the last stage of 1f1b, torch 2.11 to 2.13 list 1F1 first and no 1F0."""
    assert len(sizes(word)) >= 40
    for p, _, m in sizes(word):
        table = make_schedule(word, num_ranks=p, v=1, num_microbatches=m)
        runner = ScheduleGPipe if m < p else SINGLE[word]  # one microbatch is refused by torch's 1f1b
        for rank in range(p):
            stage = StandIn(rank, num_stages=p, num_ranks=p)
            theirs = runner(stage, m)
            theirs._initialize_stage = lambda *shapes: None
            theirs._step_microbatches([()] * m, [{}] * m)
            assert stage.ran == [str(slot) for slot in table.order(rank)], f"{word} p={p} m={m} rank {rank}"


@pytest.mark.parametrize("word", [*SINGLE, *MULTI])
def test_what_torch_refuses_is_refused(word: Schedule) -> None:
    for p in (2, 3, 4, 6):
        for v in (VIRTUAL_STAGES.get(word, 2),):
            for m in range(1, 3 * p + 2):
                stages = [StandIn(0, num_stages=p * v, num_ranks=p) for _ in range(v)]
                try:
                    SINGLE[word](stages[0], m) if word in SINGLE else MULTI[word](stages, m)
                except ValueError:
                    assert check_schedule(word, num_ranks=p, v=v, num_microbatches=m) or (word, m) == ("1f1b", 1)


# ---- on real ranks --------------------------------------------------------------------------------------------------


def recorded(stage: PipelineStage, ran: list[str]) -> PipelineStage:
    """The same stage, that also writes down what it is made to compute."""

    def record(name: str, letter: Callable[[dict[str, Any]], str]) -> None:
        compute = getattr(stage, name)

        def recording(microbatch: int, *args: Any, **options: Any) -> Any:
            ran.append(f"{stage.stage_index}{letter(options)}{microbatch}")
            return compute(microbatch, *args, **options)

        setattr(stage, name, recording)

    record("forward_one_chunk", lambda options: "F")
    record("backward_one_chunk", lambda options: "B" if options.get("full_backward", True) else "I")
    record("backward_weight_one_chunk", lambda options: "W")
    return stage


@on_ranks(2, 4)
@pytest.mark.parametrize("word", [*SINGLE, *MULTI])
def test_real_ranks_run_the_table(world: World, word: Schedule) -> None:
    p, m = world.size, 2 * world.size
    v = VIRTUAL_STAGES.get(word, 2)
    table = make_schedule(word, num_ranks=p, v=v, num_microbatches=m)
    ran: list[str] = []
    stages = [
        recorded(TorchStage(nn.Linear(3, 3), stage, p * v, world.device), ran)
        for stage, rank in enumerate(table.stage_rank)
        if rank == world.rank
    ]
    options = {"loss_fn": nn.functional.mse_loss, "scale_grads": False}
    schedule = SINGLE[word](stages[0], m, **options) if word in SINGLE else MULTI[word](stages, m, **options)
    inputs = [torch.ones(m, 3)] if table.stage_rank[0] == world.rank else []
    targets = {"target": torch.zeros(m, 3)} if table.stage_rank[-1] == world.rank else {}
    schedule.step(*inputs, **targets)
    assert ran == [str(part) for slot in table.order(world.rank) for part in slot.parts]
