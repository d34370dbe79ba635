"""Open a step: cut a batch into microbatches, and send off what this rank's share of it weighs.

batch ── own tokens (cp) ── device ── microbatches of `mb` samples ── OpenStep
           └─ weight of each microbatch ── sum over all ranks, on its way while the first forward runs
"""

from __future__ import annotations

from typing import Any

from shoal.comm.world import HostReduction, use_device
from shoal.data.batch import length, parts, to_device
from shoal.parallel.context.attention import is_cut, mark_cut
from shoal.parallel.parallel_model import ParallelModel
from shoal.train.checks import reject_arguments, reject_batch, reject_direct_loop
from shoal.train.loss.objective import CrossEntropy, reject_copied_tokens, reject_next_tokens, reject_own_count
from shoal.train.run_state import RunState
from shoal.train.step.report import Counted, OpenStep


def open_step(
    state: RunState,
    batch: Any,
    *,
    counts: bool = True,
    offset: int | None = None,
    largest: int | None = None,
    counted: Counted | None = None,
) -> OpenStep:
    """[1] Cut the batch into microbatches and send off how much this rank's share weighs, if that is not known.

    Where ranks communicate in a forward, all run as many as the rank with the largest share, and a pipeline as many as
    its schedule can run: they repeat one, which counts for nothing.

    counts   False: the batch is a stand-in, on a rank that has no sample of the global batch
    offset   the place of its first sample in the global batch; None: every rank has as many
    largest  samples of the largest share; None: all shares are equal
    counted  what the dataset knows of every global batch; None: labels are counted
    """
    reject_batch(batch, state.open_step)
    _reject_labels(state, batch)
    use_device(state.device)  # a step may be made in another thread than the one that prepared it
    composed, objective, mb = state.parallel_model, state.objective, state.plan.mb
    batch = state.own_tokens(batch)
    if isinstance(objective, CrossEntropy):
        if state.unchecked_forward is not None:
            reject_arguments(state.unchecked_forward, batch)
            state.unchecked_forward = None
        if counts:
            objective.check(batch)
    weights = [float(objective.weight(part)) if counts else 0.0 for part in parts(batch, mb)]
    offset = state.coordinate * length(batch) if offset is None else offset
    given, on_device = batch, to_device(batch, state.device, state.precision.wide_dtype)
    if composed is not None and composed.context is not None:
        mark_cut(on_device, composed.context)
    microbatches = parts(on_device, mb)
    num_own = len(microbatches)
    missing = _num_missing(composed, num_own, largest, mb)
    microbatches, weights = microbatches + microbatches[:1] * missing, weights + [0.0] * missing
    num_samples = float(length(on_device)) if counts else 0.0
    is_mean_of_means = state.policies.step.loss_mean == "microbatch"
    counted = None if is_mean_of_means else counted
    step = OpenStep(
        batch=on_device,
        microbatches=microbatches,
        weights=weights,
        num_own=num_own,
        counts=counts,
        offset=offset,
        largest=largest,
        given=given if counts else None,
        is_mean_of_means=is_mean_of_means,
        **_agreed(state, float(num_own * counts) if is_mean_of_means else sum(weights), num_samples, counted),
    )
    state.open_step = step
    return step


def _reject_labels(state: RunState, batch: Any) -> None:
    """A count in any batch; in the first one, labels that the model would shift twice, or not at all."""
    reject_own_count(batch)
    if state.unchecked_forward is None:
        return
    rule = state.objective.rule if isinstance(state.objective, CrossEntropy) else None
    if (state.shifts_labels or (rule is not None and rule.is_shifted)) and not is_cut(batch):
        reject_next_tokens(batch)
    if rule is not None and rule.hides_other:
        reject_copied_tokens(batch)


def _num_missing(composed: ParallelModel | None, num_own: int, largest: int | None, mb: int | None) -> int:
    """The microbatches that a rank has to run beside its own."""
    if composed is None:
        return 0
    meets = composed.has_collective_training_forward and largest and mb
    wanted = -(-largest // mb) if meets and largest and mb else num_own
    return (wanted if composed.pipeline is None else composed.pipeline.filled_up(wanted)) - num_own


def open_without_batch(state: RunState, number: int = 1, *, is_mean_of_means: bool = False) -> OpenStep:
    """The step of a loop that does not use `batches`: every rank's mean, of each of its microbatches, counts the
    same."""
    agreed = _agreed(state, float(number), 1.0, None)
    state.open_step = OpenStep(
        batch=None,
        microbatches=[None] * number,
        weights=[1.0] * number,
        num_own=number,
        counts=True,
        offset=0,
        is_mean_of_means=is_mean_of_means,
        **agreed,
    )
    return state.open_step


def step_of(state: RunState, batch: Any) -> OpenStep:
    """The step of this batch: the one that `batches` has opened, or a new one."""
    step = state.open_step
    if step is None or step.has_begun:
        reject_iterated_loaders(state)
        return open_step(state, batch)
    if step.batch is batch:
        return step
    state.open_step = None  # taken apart and put together again, or changed: it is still that step's share
    if state.composed.context is not None:
        mark_cut(batch, state.composed.context)
    return open_step(state, batch, counts=step.counts, offset=step.offset, largest=step.largest)


def reject_iterated_loaders(state: RunState) -> None:
    """Raise if ranks share a batch and the script goes through a loader by itself."""
    if state.gradient_degree > 1:
        reject_direct_loop(state.loaders)


def counts_like_data(state: RunState) -> bool:
    """Whether as many labels count as the data says, and nothing is gained by counting them on the way: a GPU computes
    while that number travels."""
    objective = state.objective
    is_plain = isinstance(objective, CrossEntropy) and objective.rule.is_shifted is False
    return is_plain and state.device.type == "cpu" and state.world.size > 1


def _agreed(state: RunState, weight: float, num_samples: float, counted: Counted | None) -> dict[str, Any]:
    """The sums over all ranks of weight, samples and signals, on their way; without a message, if they are known."""
    if state.parallel_model is not None:
        state.parallel_model.begin_step(state.steps_done)
    if counted is None:
        agreed = state.world.sum_of_step([weight, num_samples, *state.signals.values()])
        return {"agreed": agreed, "signals": tuple(state.signals)}
    counted.check(weight * state.gradient_degree / state.degree, num_samples)
    repeats = state.world.size / state.gradient_degree, state.world.size / state.degree
    agreed = HostReduction.known([counted.num_labels * repeats[0], counted.batch * repeats[1]])
    return {"agreed": agreed, "signals": (), "signals_with_loss": state.signals}
