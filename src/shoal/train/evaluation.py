"""The mean loss over batches that are dealt out over the ranks, each sample once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.data.batch import to_device
from shoal.data.deal import DealtLoader
from shoal.parallel.pipeline import Feed
from shoal.train.objective import call_of, loss_of_output

if TYPE_CHECKING:
    from shoal.train.run import Run


@torch.no_grad()
def evaluate(run: Run, batches: Iterable[Any], stop: Callable[[], bool] | None = None) -> float | None:
    """What `Run.evaluate_unless` returns; weights and modes of modules stay as they are."""
    composed = run.composed
    composed.before_evaluation()
    modes = {module: module.training for part in composed.parts for module in part.model.modules()}
    for part in composed.parts:
        part.model.eval()
    total, weight = torch.zeros((), dtype=torch.float64, device=run.device), 0.0
    was_stopped = False
    try:
        own = batches.own_batches() if isinstance(batches, DealtLoader) else batches
        for one in _in_lockstep(run, iter(own), stop):
            if one is None:
                was_stopped = True
                break
            whole, counts = one
            batch = run.own_tokens(whole)
            batch_weight = run.objective.weight(batch) if counts else 0
            total += _loss_sum(run, to_device(batch, run.device, run.precision.wide_dtype), batch_weight)
            weight += batch_weight
    finally:
        for module, was_training in modes.items():
            module.training = was_training
        composed.after_evaluation()
    if was_stopped:
        return None
    is_teller = run.mesh.coordinate["tp"] == 0 and (composed.pipeline is None or composed.pipeline.has_loss)
    told = [float(total), weight] if is_teller else [0.0, 0.0]
    total_sum, total_weight = run.world.all_reduce_host(told).wait()
    return total_sum / total_weight if total_weight else float("nan")


def _loss_sum(run: Run, batch: Any, weight: float) -> Tensor:
    """The loss of one batch, summed; zero on a stage that does not see it."""
    pipeline = run.composed.pipeline
    if pipeline is None:
        return run.objective.loss_sum(run.module, batch, weight)
    sums: list[Tensor] = []

    def loss(output: Any, number: int) -> Tensor:
        sums.append(loss_of_output(run.objective, output, batch, weight))
        return sums[-1]

    with run.logits_as_the_objective_takes_them():
        pipeline.forward(Feed([call_of(run.objective, batch)], loss))
    return sums[0] if sums else torch.zeros((), device=run.device)


def _in_lockstep(
    run: Run, batches: Iterator[Any], stop: Callable[[], bool] | None
) -> Iterator[tuple[Any, bool] | None]:
    """Batches, and whether they count; None in place of the next one, and then no more, if `stop` says so on any rank.
    Where ranks meet in a forward, one that has no batch left computes another once more, for nothing, until all are
    done; where they do not, it only waits for what the others say."""
    meets = run.composed.has_collective_forward
    if run.world.size == 1 or (stop is None and not meets):
        for batch in batches:
            if stop is not None and stop():
                yield None
                return
            yield batch, True
        return
    mine = next(batches, None)
    example: Any = None
    while True:
        is_asked = stop is not None and stop()
        num_left, num_asked = run.world.all_reduce_host([float(mine is not None), float(is_asked)]).wait()
        if not num_left:
            return
        if num_asked:
            yield None
            return
        if meets and example is None and num_left < run.world.size:  # some rank may never have seen a batch
            example = next(one for one in run.world.all_gather_object(mine) if one is not None)
        if mine is not None or meets:
            yield (mine, True) if mine is not None else (example, False)
        mine = next(batches, None)
