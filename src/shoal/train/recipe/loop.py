"""Train a recipe on one rank, from its first step to its summary: build, train, evaluate, report."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from rich.console import Console
from torch.distributed import Store

from shoal.blueprint.layout_drawing import draw_layout
from shoal.comm.heartbeat.heart import begin_step, phase
from shoal.comm.profile.timer import EVALUATION, part
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.config.recipe import Recipe
from shoal.data.loader import Loader, evaluation_batches
from shoal.errors import ShoalError
from shoal.launch.survivor import armed, note_joined
from shoal.numerics.lr_schedule import lr_factor, scaled_lr
from shoal.numerics.optim.build import set_lr
from shoal.numerics.precision import slow_here
from shoal.observe.progress import ProgressLine, Quiet, progress_line
from shoal.train.build_model import build_for_layout, describe
from shoal.train.optim.build import optimizer_of_run
from shoal.train.profile.of_recipe import RecipeProfile
from shoal.train.recipe.build_run import build_loader, build_run
from shoal.train.recipe.fault_injection.drill import join_drill
from shoal.train.recipe.fault_injection.faults import inject_faults
from shoal.train.recipe.invocation import RunInvocation
from shoal.train.recipe.memory.at_failure import memory_at_failure
from shoal.train.recipe.preflight import Job, first_call, reject_unlike_data, steps_of, units
from shoal.train.recipe.saving.run_storage import NoStorage, load_first_weights, open_storage
from shoal.train.recipe.saving.start_weights import expect_weights
from shoal.train.recipe.step_metrics import StepMetrics
from shoal.train.recipe.stop_signals import StopRequest, stop_on_signals
from shoal.train.recipe.sync_autotune import advice, algorithm_chosen, bucket_chosen, resolve_sync
from shoal.train.run import Run
from shoal.train.trace.find_blocks import attach_blocks


def train(placement: Placement | None, store: Store | None, job: Job, invocation: RunInvocation) -> dict[str, Any]:
    """Train on this rank; returns the summary of the run, the same on every rank."""
    launch = job.recipe.launch
    invocation = invocation.in_generation_of(placement)
    world = World.start(placement, device=launch.device, timeout=launch.timeout, store=store, threads=launch.threads)
    note_joined()
    invocation = invocation.agreed(placement, world)
    if not invocation.is_replacement:
        reject_unlike_data(world, job)
    job, sync_chosen = resolve_sync(job, world)
    recipe = job.recipe
    with build_run(recipe, world) as run, memory_at_failure(run):
        run.replica_check.every = recipe.run.check_replicas.steps(**units(recipe, job.training)) or 0
        run.compute_check.every = recipe.run.check_compute.steps(**units(recipe, job.training)) or 0
        line = _progress_line(run, job, quiet=invocation.quiet)
        model = build_for_layout(recipe.model, recipe.run.seed)
        expect_weights(recipe, model)
        attach_blocks(model, run.plan.layout.pp, functools.partial(first_call, model, job.training))
        description = describe(model)
        run.prepare(model)
        optim = recipe.optim
        lr = scaled_lr(optim.lr, batch=recipe.data.global_batch, tuned_for_batch=optim.scale_lr_from_batch)
        run.prepare(optimizer_of_run(run, optim, lr=lr, seed=recipe.run.seed))
        inject_faults(run, invocation.generation)
        join_drill(run, invocation.generation)
        storage = _storage(run, job, invocation, line)
        step_metrics = StepMetrics(
            run,
            job,
            description,
            storage.path,
            start_time=invocation.start_time,
            history=storage.state.get("history"),
            evaluation=storage.evaluation,
            say=line.say,
        )
        step_metrics.sinks.extend(invocation.sinks)
        storage.save_also(lambda: {"history": step_metrics.history()})
        choices = [text for text in (sync_chosen, algorithm_chosen(run), bucket_chosen(run), run.fused_layers) if text]
        line.note(_headline(run, job, lr, choices, storage))
        loader = build_loader(job, run, workers=recipe.data.workers)
        profile = _profile(run, job, invocation, storage, line, step_metrics, loader)
        with ExitStack() as ends:
            for one in (storage, line, step_metrics, loader, profile):  # the last one is closed first
                ends.callback(one.close)
            with stop_on_signals(line) as stop_request, phase("data"), armed():
                was_stopped = _train_and_evaluate(run, job, loader, step_metrics, line, stop_request, storage, profile)
        return {
            **step_metrics.summary(was_stopped=was_stopped),
            **storage.summary(),
            **profile.summary(),
            "resumed_from": storage.manifest.step if storage.manifest is not None else None,
            "restarts": invocation.generation,
            "auto_choices": choices,
        }


def _progress_line(run: Run, job: Job, *, quiet: bool) -> ProgressLine:
    if not run.world.is_main:
        return Quiet(Console(quiet=True))
    unit = "tok" if job.training.tokens_per_sample is not None else "sample"
    return progress_line(Console(stderr=True), quiet=quiet, unit=unit)


def _storage(run: Run, job: Job, invocation: RunInvocation, line: ProgressLine) -> NoStorage:
    if not invocation.save:
        load_first_weights(run, job, line)
        return NoStorage()
    storage = open_storage(run, job, line, invocation)
    if storage.manifest is None and invocation.saved_before:
        storage.close()
        raise ShoalError(
            f"the hosts that are left find no checkpoint, but step {invocation.saved_before} of this run was saved",
            fix="--checkpoint.dir /shared/run, a directory that all hosts share, or --checkpoint.memory_every 1step",
            code="N069",
        )
    if storage.manifest is not None and storage.manifest.step < invocation.saved_before:
        found, newest = storage.manifest.step, invocation.saved_before
        line.say(
            f"step {newest} of this run was saved, but the hosts that are left hold no newer one than step {found} that"
            f" can be used: what came after step {found} is made again"
        )
    return storage


def _profile(
    run: Run,
    job: Job,
    invocation: RunInvocation,
    storage: NoStorage,
    line: ProgressLine,
    metrics: StepMetrics,
    loader: Loader,
) -> RecipeProfile:
    steps = job.recipe.run.profile.steps(**units(job.recipe, job.training)) or 0
    profile = RecipeProfile(
        run,
        job.recipe,
        steps,
        storage.path,
        line.note,
        is_only=invocation.only_profiles,
        mfu=metrics.mfu,
        leave_out=metrics.leave_out,
    )
    profile.loader_processes = lambda: loader.num_processes
    profile.begin()
    return profile


def _train_and_evaluate(
    run: Run,
    job: Job,
    loader: Loader,
    step_metrics: StepMetrics,
    line: ProgressLine,
    stop_request: StopRequest,
    storage: NoStorage,
    profile: RecipeProfile,
) -> bool:
    """Make all steps, save the last one and evaluate; returns whether a signal stopped the run before its end."""
    was_stopped = _steps(run, job, loader, step_metrics, line, stop_request, storage)
    run.check_last_step()
    profile.finish()
    step_metrics.flush()
    if profile.is_only:
        storage.finish()
        return was_stopped
    if not was_stopped:
        run.sync_replicas()
    with phase("save"):
        storage.begin_last_save()  # before the evaluation, which may take long and may fail
    if not was_stopped:  # after a signal, the user does not wait for an evaluation
        was_stopped = not _evaluate(run, job, step_metrics, line, stop_request)
    with phase("save"):
        storage.finish()
    return was_stopped


def _steps(
    run: Run,
    job: Job,
    loader: Loader,
    step_metrics: StepMetrics,
    line: ProgressLine,
    stop_request: StopRequest,
    storage: NoStorage,
) -> bool:
    """Make optimizer steps until the duration is reached, or until a rank got a signal: then True, on every rank."""
    settings = job.recipe.run
    num_steps, seconds = steps_of(job), settings.duration.seconds or 0.0
    evaluate_every = settings.evaluate_every.steps(**units(job.recipe, job.training)) or 0

    def stopped_evaluating() -> bool:
        """Evaluate if it is due and not done yet; whether a signal stopped the evaluation."""
        done = run.steps_done
        if not evaluate_every or not done or done % evaluate_every or step_metrics.evaluated_at == done:
            return False
        with part(EVALUATION):
            is_complete = _evaluate(run, job, step_metrics, line, stop_request)
        if is_complete and step_metrics.eval_loss is not None:
            line.note(f"step {done}: validation loss {step_metrics.eval_loss:.4f}")
        return not is_complete

    start = time.monotonic() - step_metrics.seconds_before
    elapsed = step_metrics.seconds_before
    if run.steps_done >= num_steps if num_steps else elapsed >= seconds:  # the run resumes at its end
        return False
    if stopped_evaluating():  # the run resumes at a step whose evaluation was stopped
        return True
    stop_request.is_first_step = True
    for batch in run.batches(loader):
        done = (run.steps_done + 1) / num_steps if num_steps else min(elapsed / seconds, 1.0)
        set_lr(run.optimizer, _lr_factor(job, run.steps_done + 1, done))
        number, compiles = run.steps_done + 1, bool(settings.compile)
        with _noting_step(number), begin_step(number, compiles=compiles), step_metrics.overlap.step(run.steps_done):
            run.step(batch)
        stop_request.is_first_step = False
        step_metrics.record_step(loader, line, done)
        # Rank 0's clock and the stop requests of all ranks are sent with the step's count or loss, so all ranks agree.
        elapsed = run.agreed.get("seconds", step_metrics.seconds_before)
        is_over = run.steps_done >= num_steps if num_steps else elapsed >= seconds
        if is_over or run.agreed.get("stop", 0.0):
            return not is_over
        if stopped_evaluating():
            return True
        stop_request.acknowledge()
        with phase("save"), part("save"):
            storage.after_step(is_due=bool(run.agreed.get("save", 0.0)))
        clock = _clock_of_main(start, storage) if run.world.is_main else _NO_CLOCK
        run.signals = {"stop": float(bool(stop_request)), **clock}
    raise AssertionError("a Loader never ends")


@contextmanager
def _noting_step(number: int) -> Iterator[None]:
    """Add the number of the step to an exception: one that is raised twice in the same step will not pass."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in step {number}")
        raise


_NO_CLOCK = {"seconds": 0.0, "save": 0.0}


def _clock_of_main(start: float, storage: NoStorage) -> dict[str, float]:
    """Signals that only the main rank's clock decides; the other ranks add zeros."""
    return {"seconds": time.monotonic() - start, "save": float(storage.is_due)}


def _evaluate(run: Run, job: Job, step_metrics: StepMetrics, line: ProgressLine, stop_request: StopRequest) -> bool:
    """Compute the validation loss, if there are samples; False, on every rank, if a signal stopped it."""
    run.check_last_step()
    step_metrics.flush()
    total = len(job.validation)
    if not total:
        return True
    size = run.plan.microbatch_size(job.recipe.data.global_batch) * run.degree
    batches: Iterator[Any] = evaluation_batches(
        job.validation, batch=size, coordinate=run.coordinate, degree=run.degree
    )
    if job.recipe.run.fast_dev_run:
        batches, total = itertools.islice(batches, 2), min(total, 2 * size)

    def shown() -> Iterator[Any]:
        for number, batch in enumerate(batches):  # each is taken after the one before it was evaluated
            line.evaluating(number * size, total)
            yield batch

    with phase("evaluation"), nullcontext() if run.ema is None else run.ema.applied():
        loss = run.evaluate(shown(), stop=lambda: bool(stop_request))
    if loss is None:
        line.say("stopping without the rest of the evaluation; press Ctrl-C again to end at once")
        return False
    step_metrics.record_evaluation(loss)
    return True


def _lr_factor(job: Job, step: int, done: float) -> float:
    """The learning rate of a step, counted from 1, as a fraction of its peak; `done` is the progress after it."""
    optim, duration, num_steps = job.recipe.optim, job.recipe.run.duration, steps_of(job)
    warmup_steps = optim.warmup.steps(**units(job.recipe, job.training))
    if num_steps is not None:
        return lr_factor(optim.schedule, done, warmup=(warmup_steps or 0) / num_steps, final=optim.final_lr)
    done = max(done, 1e-3)  # the clock is at zero in the first step, and a rate of zero would waste that step
    if warmup_steps is None:
        part = (optim.warmup.seconds or 0.0) / (duration.seconds or 1.0)
        return lr_factor(optim.schedule, done, warmup=part, final=optim.final_lr)
    # A run by the clock does not know which fraction of it these steps will be. So the ramp multiplies the schedule.
    ramp = min(step / warmup_steps, 1.0) if warmup_steps else 1.0
    return ramp * lr_factor(optim.schedule, done, final=optim.final_lr)


def _headline(run: Run, job: Job, lr: float, choices: list[str], storage: NoStorage) -> str:
    """The lines above the progress bar."""
    recipe = job.recipe
    parameters = run.composed.num_parameters
    model = " ".join(filter(None, (recipe.model.name, recipe.model.preset)))
    lines = [
        f"model  {model}: {parameters:,} parameters{_adapters(recipe)}, {run.plan.precision}",
        f"data   {job.training.describe()}",
        f"plan   {run.plan.brief()}",
        f"step   {recipe.data.global_batch} samples = {_counted(run.degree, 'data rank')}"
        f" x {_counted(run.plan.num_microbatches(recipe.data.global_batch), 'microbatch', 'es')}"
        f" x {_counted(run.plan.microbatch_size(recipe.data.global_batch), 'sample')}",
    ]
    if recipe.run.compile:
        lines.append("first  the first step compiles the model, which takes a while")
    if recipe.data.global_batch > len(job.training):
        lines.append(_repeats(recipe.data.global_batch, len(job.training)))
    if recipe.optim.scale_lr_from_batch:
        lines.append(
            f"lr     {recipe.optim.lr:g} x {recipe.data.global_batch} / {recipe.optim.scale_lr_from_batch} = {lr:g}"
            " (linear scaling rule)"
        )
    if run.world.size > 1:
        lines += [" " * 7 + line for line in draw_layout(run.plan.layout, run.world.local_size).splitlines()]
    lines += [f"sync   {text}" for text in (*choices, advice(recipe)) if text]
    if run.world.is_main and (slow := slow_here(run.precision, run.device)):
        lines.append(f"slow   {slow}")
    if storage.manifest is not None:
        ranks = _counted(int(storage.state.get("ranks", 1)), "rank")
        lines.append(f"resume from step {storage.manifest.step}, saved by {ranks}")
    elif storage.beside:
        lines.append(f"start  over, in {str(storage.path)!r}: {storage.beside}")
    return "\n".join(lines)


def _repeats(batch: int, num_samples: int) -> str:
    note = f"note   a step has {batch} samples and the data {num_samples}: samples repeat within a step"
    return f"{note}; not with --data.global_batch {num_samples} or less"


def _adapters(recipe: Recipe) -> str:
    """A few words about LoRA; empty: it is off."""
    lora = recipe.model.lora
    return "" if lora is None else f" with adapters of rank {lora.rank}, which alone are trained"


def _counted(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{'' if number == 1 else plural}"
