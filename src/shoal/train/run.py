"""`Run`: the training step, for a loop of your own and for shoal's.

One step, four microbatches, two ranks (s: loss sum, w: how many tokens count, W: their number over the global batch):

    rank 0   open [1] ── F B ── F B ── F B ── F B ┐[3]
                 └ W ──────────[2]                ├─ norm, clip, update [4]
    rank 1   open [1] ── F B ── F B ── F B ── F B ┘

[1] w is known from the data; its sum W over all ranks travels while the first forward runs, unless the dataset says how
    many labels of each sample count. A head that computes the loss reads W when it computes it, after the forward.
[2] Each backward starts from  s * degree / W.  Gradients are averaged over `degree` ranks, those that see other samples
    or other tokens of them, so the gradient is  Σ s / W.  A loss function shows w only after the forward: there W is an
    estimate, and [4] begins with the correction of it (`late_count`).
[3] Gradients are synchronised once, during the backward of the last microbatch.
[4] The global norm is the same number on every rank, and so is everything that is decided by it.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal.blueprint.description import Description
from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.bf16_weights import reject_bf16_weights
from shoal.checkpoint.async_saver import AsyncSaver
from shoal.comm.mesh import Mesh
from shoal.comm.rendezvous.environment import read_environment
from shoal.comm.world import HostReduction, World, use_device
from shoal.data.batch import length, parts, to_device
from shoal.data.loader import Loader
from shoal.data.sharded_dataloader import ShardedDataLoader
from shoal.errors import ShoalError, raise_if
from shoal.hash_rng import hashed_number
from shoal.numerics.async_scalars import AsyncScalars
from shoal.numerics.determinism import make_deterministic
from shoal.numerics.fp8.convert import FromHead, Scaling
from shoal.numerics.gradients import LossScale, gradients_of, scale_
from shoal.numerics.init import init_missing
from shoal.numerics.local_tensor import to_local
from shoal.numerics.offload import HostCopies
from shoal.numerics.optim.build import memory_of_squares
from shoal.numerics.precision import Weights, precision_of
from shoal.parallel.checks import reject_unsupported
from shoal.parallel.compose import compose
from shoal.parallel.context.attention import Backend, cut_batch, mark_cut
from shoal.parallel.data.ddp import explain_unused
from shoal.parallel.data.local_sgd import DEFAULT_OUTER, OuterOptimizer
from shoal.parallel.options import Options, Wanted
from shoal.parallel.parallel_model import ParallelModel
from shoal.parallel.pipeline.pipeline import MicrobatchFeed
from shoal.parallel.tensor import TensorParallel
from shoal.train.build_model import describe
from shoal.train.checks import (
    refuse_arguments,
    refuse_batch,
    refuse_compiled,
    refuse_direct_loop,
    refuse_late_routers,
    refuse_open,
    refuse_options,
    refuse_own_loop,
    refuse_rounding,
    refuse_second,
    refuse_several,
    refuse_unknown_batch,
    refuse_unprepared,
    refuse_wrapped,
    rule_under,
    with_all_backwards,
)
from shoal.train.evaluate import evaluate
from shoal.train.loss.counting import Kind, Loss, read_loss
from shoal.train.loss.late_count import agree, agree_on_kind, convention, is_late, refuse_uncounted, take
from shoal.train.loss.message import LossMessage
from shoal.train.loss.objective import (
    CrossEntropy,
    LabelRule,
    LossFunction,
    MeanOf,
    Objective,
    call_of,
    loss_of_output,
    objective_of,
)
from shoal.train.optimizer_step import OnNan, Updates, misspelt
from shoal.train.rebind_optimizer import rebind_optimizer
from shoal.train.replica_check import ReplicaCheck, check_replicas_problems
from shoal.train.schedulers import check_optimizer, encoded_state, is_scheduler
from shoal.train.step import Counted, OpenStep, PendingStep, StepReport


class Run:
    """A rank's part in a training run. docs/run.md shows loops of one's own, validation and saving.

    plan            words such as "bf16 mb=4", or a Plan; the ranks are found under python, torchrun, srun and mpirun
    loss            loss(model, batch), the mean over a microbatch, or (sum, count); None: cross-entropy of
                    model(inputs) and labels, which a model that takes labels may shift
    seed            decides the order of the samples and all randomness in the model
    clip            the largest global gradient norm; None: no clipping
    on_nan          stop the run, skip the update, or ignore it, when a gradient is not finite
    check_replicas  after how many steps, again and again, ranks compare checksums of all that they hold copies of; a
                    flipped bit ends the run, with its tensor and rank; 0: never
    device          auto, cpu or cuda
    deterministic   the same bits again on the same layout
    loss_scale      the first loss scale under fp16, and after how many good steps it is doubled (loss_scale_window)
    bucket_mb       size of the buckets in which gradients are reduced; None: 25, and 1 for the first; "auto": measured
    find_unused     parameters may be without a gradient in some steps
    sync_batch_norm batch norm normalises with the statistics of a microbatch over all ranks, not of each rank's part
    compile         let torch.compile make each block of the model faster; a word is the backend to use
    attention       the kernel of attention on a GPU: auto (the fastest), cudnn, flash, efficient or math
    fused_loss      compute the loss inside the model's last layer, without ever holding all logits; None: where it can
    fp8             under the precision fp8, what of a tensor shares one scale: tensorwise or rowwise
    fp8_min_features      layers with fewer features than this stay in bf16 then; None: as fast as was measured
    fp8_head        gradients: a head that computes the loss computes its gradients in fp8 then; its logits never are
    weights         what parameters and their gradients are kept in: fp32; or bf16, under the precisions bf16 and fp8,
                    with an optimizer that rounds at random, such as shoal.AdamW
    recompute_swiglu    make the gated values of a feed-forward again in the backward; False: keep them, which is faster
    algorithm       what carries gradients between replicas: builtin (torch's own), ring, tree, double_tree, halving,
                    hierarchical or naive; auto: whichever is fastest here, measured when the model is prepared
    warmup_steps    how many of the first steps send gradients as they are under compress= and sync=; None: as the
                    method wants
    outer           under sync=, the optimizer of the shared weights: shoal.OuterOptimizer(lr=0.7, momentum=0.9,
                    fragments=1, delay=0, rescale=True)
    timeout         seconds that a rank waits for the others in one collective
    threads         CPU threads of this process; None: an even share of the cores
    world           the ranks, if someone else has gathered them
    """

    def __init__(
        self,
        plan: Plan | str | Mapping[str, Any] = "auto",
        *,
        loss: LossFunction | Objective | None = None,
        seed: int = 0,
        clip: float | None = None,
        on_nan: OnNan = "stop",
        check_replicas: int = 0,
        device: str = "auto",
        deterministic: bool = False,
        loss_scale: float = 65536.0,
        loss_scale_window: int = 2000,
        bucket_mb: float | Literal["auto"] | None = None,
        find_unused_parameters: bool = False,
        sync_batch_norm: bool = False,
        compile: bool | str = False,
        attention: Backend = "auto",
        fused_loss: bool | None = None,
        fp8: Scaling = "tensorwise",
        fp8_min_features: int | None = None,
        fp8_head: FromHead = "gradients",
        weights: Weights = "fp32",
        recompute_swiglu: bool = True,
        algorithm: Wanted = "builtin",
        warmup_steps: int | None = None,
        outer: OuterOptimizer = DEFAULT_OUTER,
        timeout: float = 600.0,
        threads: int | None = None,
        world: World | None = None,
        **unknown: Any,
    ) -> None:
        refuse_options(unknown, inspect.signature(Run.__init__).parameters)
        if deterministic:
            make_deterministic()
        asked = Plan.of(plan)
        told = misspelt(clip=clip, on_nan=on_nan, loss_scale=loss_scale, loss_scale_window=loss_scale_window)
        raise_if([*told, *check_replicas_problems(check_replicas)], title="the options of a run")
        self.objective = objective_of(loss)
        if fused_loss and not isinstance(self.objective, CrossEntropy):
            raise ShoalError(
                "a loss of one's own is not computed inside the model's last layer",
                fix="fused_loss=None; or no loss=, which is the cross-entropy of batches with labels",
            )
        self.options = Options(
            seed=seed,
            bucket_mb=bucket_mb,
            find_unused_parameters=find_unused_parameters,
            sync_batch_norm=sync_batch_norm,
            compile=compile,
            attention=attention,
            fused_loss=fused_loss,
            fp8=fp8,
            fp8_min_features=fp8_min_features,
            fp8_head=fp8_head,
            recompute_swiglu=recompute_swiglu,
            algorithm=algorithm,
            warmup_steps=warmup_steps,
            outer=outer,
        )
        place = read_environment(os.environ)
        self.world = world or World.start(place, device=device, timeout=timeout, threads=threads)
        self.plan = asked.resolve(self.world.size)
        reject_unsupported(self.plan)
        if self.plan.sync == "auto":
            raise ShoalError("sync=auto is chosen by `shoal train`", fix="sync=diloco:50, compress=int8, or neither")
        if weights == "bf16":
            reject_bf16_weights(self.plan, weights="weights='fp32'", precision="Run('bf16')")
        self.precision = precision_of(self.plan.precision, weights)
        scale = LossScale(loss_scale, loss_scale_window) if self.precision.scales_loss else LossScale()
        self.updates = Updates(world=self.world, loss_scale=scale, clip=clip, on_nan=on_nan)
        self.seed = seed
        self.mesh = Mesh.make(self.world, self.plan.layout)
        self.tensor = TensorParallel(self.mesh.groups.get("tp"), splits_tokens=bool(self.plan.sp))
        """For layers that a model's author splits: ColumnParallelLinear(..., tensor=run.tensor)."""
        self.coordinate = self.plan.layout.data_coordinate(self.world.rank)
        self.degree = self.plan.layout.data_degree
        self.gradient_degree = self.plan.layout.degree("dp_cp")
        self.steps_done = 0
        self.replica_check = ReplicaCheck(check_replicas)
        self.signals: dict[str, float] = {}
        """Numbers that this rank adds to the next step's; their sums over all ranks come back in `agreed`."""
        self.agreed: dict[str, float] = {}
        self.report: StepReport | None = None
        """What is known of the last step."""
        self.on_microbatch: Callable[[int], None] | None = None
        """Called with its number before the forward of each microbatch; in a pipeline, of each stage of this rank."""
        self.on_gradients: Callable[[], None] | None = None
        """Called when the gradients of a step are whole, before they are clipped."""
        self._composed: ParallelModel | None = None
        self._forward: inspect.Signature | None = None
        """What the model's forward takes, until a batch was compared with it."""
        self._description = Description()
        self._optimizer: Optimizer | None = None
        self.host_copies: HostCopies | None = None
        self.loaders: list[ShardedDataLoader] = []
        self.schedulers: list[Any] = []
        """Prepared schedulers of learning rates, which the script steps."""
        self.saved_loaders: list[dict[str, Any]] = []
        """What the run that was loaded said of its loaders, and where they had come to."""
        self.extra: dict[str, Any] = {}
        """What was saved beside the run that was loaded."""
        self.savers: dict[str, AsyncSaver] = {}
        """Directory → what saves to it while the run goes on."""
        self._step: OpenStep | None = None
        self._is_updating = False
        """Whether it is this run that lets the optimizer make a step, and not a loop of the script's."""
        self.counts_late = self.compares_samples = False
        """Whether the count of the last step's loss was known only after its forwards, or not even then."""

    # ---- what a loop prepares --------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        return self.world.device

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for all."""
        return self.world.is_main

    @property
    def loss_scale(self) -> LossScale:
        """What losses are multiplied by under fp16; elsewhere 1."""
        return self.updates.loss_scale

    @property
    def composed(self) -> ParallelModel:
        """The prepared model as it lies over the ranks."""
        if self._composed is None:
            raise ShoalError(
                "this run has no model yet", fix="model, optimizer, loader = run.prepare(model, optimizer, loader)"
            )
        return self._composed

    @property
    def model(self) -> nn.Module:
        """The prepared model, which a forward calls."""
        return self.composed.model

    @property
    def module(self) -> nn.Module:
        """The model itself, under the names that it has on one device; in a pipeline, this rank's first stage."""
        return self.composed.parts[0].model

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What of the model's parameters this rank holds; an optimizer of one's own is built over them."""
        return list(self.composed.named.values())

    @property
    def optimizer(self) -> Optimizer:
        """The prepared optimizer."""
        if self._optimizer is None:
            raise ShoalError("this run has no optimizer yet", fix="model, optimizer = run.prepare(model, optimizer)")
        return self._optimizer

    def weights(self) -> dict[str, Tensor]:
        """Every parameter, whole, under the name that it has on one device, in host memory of the main rank; and what
        else a run learns: biases of routers, running statistics of batch norm. It is empty on the other ranks, which
        have to call this too."""
        self.settle()
        with self.composed.shared_weights():
            self.composed.before_evaluation()
            found = {**dict(self.composed.whole("weight")), **self.composed.biases()}
            found |= self.composed.running_statistics()
        return {name: tensor for name, tensor in found.items() if tensor is not None and self.is_main}

    def save(
        self,
        directory: str | Path,
        *,
        wait: bool = True,
        keep: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the run as it is after its last step to a directory of this step in `directory`: parameters, optimizer
        and its learning rate, prepared schedulers, loss scale, the positions of prepared loaders, and how many steps
        were made. Every rank calls it.

        wait    True: return when all of it is on the disk, or raise. False: when it is copied; it is written while the
                run goes on, one save at a time, and `run.saved(directory)` waits for it
        keep    how many of the newest steps stay; None: all of them, and two if nobody waits
        extra   what else is to be there after `load`, as `run.extra`: anything that JSON can say; that of the main rank
        """
        from shoal.train.run_checkpoint import save_run

        save_run(self, directory, wait=wait, keep=keep, extra=extra)

    def saved(self, directory: str | Path) -> None:
        """Return when what was saved without waiting is on the disk; raise if it could not be."""
        from shoal.train.run_checkpoint import wait_for

        if (saver := self.savers.get(str(directory))) is not None:
            wait_for(saver)

    def load(self, directory: str | Path, *, step: int | None = None, only_weights: bool = False) -> int:
        """Go on from what was saved, by any layout on any number of ranks, of a step, or of the newest one. Every rank
        calls it, when model, optimizer, schedulers and loaders are prepared; returns how many steps were made.
        `only_weights`: take the model alone, for a run of another kind."""
        from shoal.train.run_checkpoint import load_run

        return load_run(self, directory, step, only_weights=only_weights)

    def prepare(self, *things: Any) -> Any:
        """Place a model, an optimizer, its schedulers and loaders, in any order; returns them in that order.

        A `DataLoader`'s batch_size is the *global* batch: each rank gets its share, so the same script computes the
        same thing on any number of ranks. A scheduler is saved and loaded with the run; the script steps it.
        """
        models = {id(thing): self._prepare_model(thing) for thing in things if isinstance(thing, nn.Module)}
        prepared = tuple(models[id(thing)] if id(thing) in models else self._prepare(thing) for thing in things)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare(self, thing: Any) -> Any:
        if isinstance(thing, Optimizer):
            refuse_second("optimizer", self._optimizer)
            refuse_rounding(thing, self.precision.weight_dtype)
            for scheduler in self.schedulers:
                check_optimizer(scheduler, thing)
            thing.register_step_pre_hook(self._before_optimizer)
            self._optimizer = thing
            if self._composed is not None:
                self._give_parameters(thing, self._composed)
            return thing
        if isinstance(thing, DataLoader):
            loader = ShardedDataLoader(thing, seed=self.seed, coordinate=self.coordinate, degree=self.degree)
            loader.cut = self.own_tokens
            loader.needs_equal_steps = lambda: self._composed is not None and self._composed.has_collective_forward
            if len(self.loaders) < len(self.saved_loaders):  # a run was loaded that had it
                self._continue_loader(loader, len(self.loaders))
            self.loaders.append(loader)
            return loader
        if is_scheduler(thing):
            check_optimizer(thing, self._optimizer)
            encoded_state(thing)  # rejects now what a save would reject later
            if all(thing is not known for known in self.schedulers):
                self.schedulers.append(thing)
            return thing
        raise ShoalError(
            f"prepare cannot place a {type(thing).__name__}",
            fix="give it an nn.Module, a torch Optimizer, a scheduler or a DataLoader; keep the rest as it is",
        )

    def _continue_loader(self, loader: ShardedDataLoader, number: int) -> None:
        from shoal.train.run_checkpoint import loader_changes

        known = self.saved_loaders[number]
        raise_if(loader_changes(number, known, loader))
        loader.position = tuple(known["position"])

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        refuse_second("model", self._composed)
        refuse_wrapped(model)
        refuse_compiled(model)
        init_missing(model, self.seed)
        description = describe(model)
        rule = LabelRule.of(model)
        self._forward = inspect.signature(model.forward)
        self._composed = compose(
            model,
            self.plan,
            description=description,
            mesh=self.mesh,
            tensor=self.tensor,
            precision=self.precision,
            options=self.options,
        )
        self._description = description
        if self._composed.reducer is not None:
            self._composed.reducer.may_be_dropped = self.updates.on_nan == "skip"
        if self._composed.balance is not None:
            self._composed.balance.factor = self._factor_of_open_step
        if self._composed.batch_norm is not None:
            self._composed.batch_norm.counts = self._counts_now
        if isinstance(self.objective, CrossEntropy):
            rule = rule_under(self.plan, rule)
            self.objective = CrossEntropy(self._composed.tensor, self._composed.head, rule)
        if isinstance(self.objective, MeanOf):
            self.objective.is_compiled = bool(self.options.compile)
        if self._optimizer is not None:
            self._give_parameters(self._optimizer, self._composed)
        return self._composed.model

    def _give_parameters(self, optimizer: Optimizer, composed: ParallelModel) -> None:
        """Let an optimizer hold what became of its parameters; under offload, copies of it in host memory."""
        rebind_optimizer(optimizer, composed)
        if composed.islands is not None:
            composed.islands.rescale(memory_of_squares(optimizer), next(iter(composed.named.values())))
        is_elsewhere = self.plan.offload == "optimizer" and self.device.type != "cpu"
        self.host_copies = HostCopies(optimizer, to_local) if is_elsewhere else None

    # ---- one step --------------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """This rank's share of each global batch, on the device. Every rank gets as many, so all take every step."""
        if isinstance(loader, ShardedDataLoader):
            for share in loader.shares():
                yield self._open(share.batch, counts=share.counts, offset=share.offset, largest=share.largest).batch
        else:
            refuse_unprepared(loader, self.world.size)
            counted = Counted.of(loader) if isinstance(loader, Loader) and self._counts_like_data() else None
            for batch in loader:
                yield self._open(batch, counted=counted).batch

    def step(self, batch: Any, *others: Any) -> Tensor:
        """Forward, backward and update over this rank's share of a global batch; returns the global loss."""
        refuse_several(others)
        if self.composed.pipeline is not None:
            self._pipeline_step(self._opened(batch))
            return self.update().loss
        head = self.composed.head
        for microbatch in self.microbatches(batch):
            assert self._step is not None
            try:  # a head that computes the loss and knows what that counts for has nothing to do in the backward
                with nullcontext() if head is None else head.with_grad_scale(self._factor):
                    loss_sum = self.objective.loss_sum(self.model, microbatch, self._step.weight)
            except RuntimeError as error:
                explain_unused(error)
                raise
            self._backward(loss_sum)
        return self.update().loss

    def microbatches(self, batch: Any) -> Iterator[Any]:
        """The batch in parts of `mb` samples; gradients are synchronised in the backward of the last one only."""
        refuse_own_loop(self.composed)
        step = self._opened(batch)
        last = len(step.microbatches) - 1
        for index, microbatch in enumerate(step.microbatches):
            step.index = index
            self._begin(step, index)
            with self.composed.synchronised(is_last=index == last):
                yield microbatch

    def _pipeline_step(self, step: OpenStep) -> None:
        """All microbatches through the stages of this rank. Only the last stage sees a loss."""
        assert self.composed.pipeline is not None
        total, factor = self._total_weight(step), self._factor()

        def loss(output: Any, number: int) -> Tensor:
            weight = step.weights[number]
            self._seed(self.steps_done, place(number))  # a loss that draws, draws what it drew for the call
            returned = loss_of_output(self.objective, output, step.microbatches[number], weight)
            is_alone = self._is_alone(step)
            loss_sum = take(step, returned, number, weight=total if is_alone else weight, is_alone=is_alone)
            step.sums.append(loss_sum.detach() / total)
            return loss_sum * factor

        def place(number: int) -> int:
            return step.offset + number * (self.plan.mb or 0)

        def call(number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            self._seed(self.steps_done, place(number))
            return call_of(self.objective, step.microbatches[number])

        def begin(number: int, stage: int) -> None:
            self._begin(step, number, stage)

        calls = [call(number) for number in range(len(step.microbatches))]
        with self.logits_as_the_objective_takes_them():
            self.composed.pipeline.step(MicrobatchFeed(calls, loss, begin))
        step.has_run = True

    def logits_as_the_objective_takes_them(self) -> AbstractContextManager[None]:
        """A stage calls the model itself, outside of the objective, which would have asked for split logits."""
        return self.composed.tensor.split_logits() if isinstance(self.objective, CrossEntropy) else nullcontext()

    def backward(self, loss: Tensor | tuple[Tensor, Tensor | float]) -> None:
        """Backward of a loss that is the *mean* over the microbatch (or the batch, without accumulation) at hand, or
        (sum, count)."""
        refuse_own_loop(self.composed)
        if self._step is None:  # a loop that does not use `batches`: every rank's mean counts the same
            self._refuse_direct_loop()
            refuse_unknown_batch(self.composed)
            self._step = self._new_step(None, [None], [1.0], counts=True, offset=0)
        self._backward(read_loss(loss))

    def update(self) -> StepReport:
        """Clip, apply the optimizer and forget the gradients; or drop the step if the gradient is not finite."""
        step = with_all_backwards(self._step)
        self.settle()
        self.counts_late = self._is_late(step)
        message = step.message
        loss = self._own_loss(step) if message is None else message.loss
        if message is None and self.world.size > 1 and (not self.counts_late or step.signals_with_loss is not None):
            own = loss.clone() if self.counts_late else loss
            message = LossMessage.send(own, step.signals_with_loss)  # travels during the update
        statistics = self.composed.statistics
        if statistics is not None:
            statistics.begin()
        self.composed.finish_gradients(self.steps_done)
        if self.counts_late:
            loss = self._correct(step, loss)
        if self.on_gradients is not None:
            self.on_gradients()
        trained = self.trained_parameters()
        scale = self.loss_scale.scale
        norm = self.composed.norm(trained, scale=scale, clip=self.updates.clip) / scale
        self._is_updating = True
        try:
            is_applied = self.updates.apply(self.optimizer, self.host_copies, trained, norm)
        finally:
            self._is_updating = False
        if self.composed.reducer is not None:
            self.composed.reducer.commit(is_applied)
        experts = self.composed.balance_experts(is_applied=is_applied)
        if message is not None:
            loss_of_all, signals = message.wait()
            self.agreed |= signals
            if not self.counts_late:
                loss = loss_of_all
        if statistics is not None:
            statistics.finish()
        report = StepReport(
            loss, norm, AsyncScalars(loss, norm), keeps_nonfinite=self.updates.keeps_nonfinite, experts=experts
        )
        self.updates.unjudged = PendingStep(report, self.steps_done + 1, step.sums, self.composed.norms)
        if isinstance(is_applied, bool):
            self.settle()
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.composed.named.values():  # of those that no optimizer has, too
            parameter.grad = None
        self.steps_done += 1
        if self.composed.islands is not None:
            self.composed.islands.after(self.steps_done)
        self._step = None
        report.overlap = self.composed.overlap()
        if self.composed.balance is not None:
            self.composed.balance.factor = self._factor_of_open_step
        self.report = report
        self.replica_check.after(self, self.steps_done)
        return report

    def settle(self) -> None:
        """Judge the last step now, and wait for it: end the run, or say why its update was dropped, if its gradient was
        not finite. On a GPU that is known only when the next step has been asked for, unless somebody asks here."""
        self.updates.settle()

    def trained_parameters(self) -> list[nn.Parameter]:
        """What the optimizer updates, of the model; under offload, it holds copies of them."""
        if self.host_copies is not None:
            return [parameter for parameter, _ in self.host_copies.pairs]
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _is_late(self, step: OpenStep) -> bool:
        """Whether gradients are still to be divided by what the forwards have counted; the same on every rank. Raise if
        the losses of microbatches and ranks cannot be put together."""
        is_in_pipeline = self.composed.pipeline is not None  # of which only last stages have seen a loss
        is_counted = isinstance(self.objective, MeanOf) if is_in_pipeline else bool(step.kinds)
        kind = agree_on_kind(step, self.world) if is_counted else None
        is_alone = self._is_alone(step)
        self.compares_samples = kind in (Kind.MEAN, Kind.SUM) and not is_alone
        if self.compares_samples:
            assert kind is not None
            refuse_uncounted(step, kind, self.world)
        return is_late(kind, is_alone=is_alone)

    def _is_alone(self, step: OpenStep) -> bool:
        """Whether the global batch is one microbatch, whose mean is the loss."""
        is_one = len(step.microbatches) == 1 or (step.index < 0 and self.composed.pipeline is None)
        return self.gradient_degree == 1 and is_one

    def _correct(self, step: OpenStep, loss: Tensor) -> Tensor:
        """Divide gradients by the count of the global batch in place of its estimate; the loss of it."""
        agreed = agree(
            step,
            loss,
            estimate=self._total_weight(step),
            is_teller=self.mesh.coordinate["tp"] == 0,
            world_size=self.world.size,
        )
        if self.composed.balance is not None:
            refuse_late_routers(agreed.correction)
        corrected = {id(one): one for one in [*self.composed.named.values(), *self.trained_parameters()]}
        scale_([to_local(gradient) for gradient in gradients_of(corrected.values())], agreed.correction)
        if isinstance(self.objective, CrossEntropy) and self.objective.rule.is_shifted is None:
            self.objective.rule.is_shifted = convention(agreed)
        return agreed.loss

    def _own_loss(self, step: OpenStep) -> Tensor:
        """This rank's part of the loss: of those that computed the same one, only the first has it."""
        if step.sums and self.mesh.coordinate["tp"] == 0:
            total = step.sums[0].clone() if len(step.sums) == 1 else torch.stack(step.sums).sum()
            return total.to(self.precision.wide_dtype)
        return torch.zeros((), dtype=self.precision.wide_dtype, device=self.device)

    def _opened(self, batch: Any) -> OpenStep:
        """The step of this batch: the one that `batches` has opened, or a new one."""
        step = self._step
        if step is None or step.has_begun:
            self._refuse_direct_loop()
            return self._open(batch)
        if step.batch is batch:
            return step
        self._step = None  # taken apart and put together again, or changed: it is still that step's share
        if self.composed.context is not None:
            mark_cut(batch, self.composed.context)
        return self._open(batch, counts=step.counts, offset=step.offset, largest=step.largest)

    def refuse_open_step(self, why: str) -> None:
        """Raise between a batch that was taken and its update."""
        refuse_open(self._step, why)

    def _before_optimizer(self, *_: Any) -> None:
        """A loop that was left as it was for one device lets the optimizer make steps itself."""
        if not self._is_updating:
            self._refuse_direct_loop()

    def _refuse_direct_loop(self) -> None:
        if self.gradient_degree > 1:
            refuse_direct_loop(self.loaders)

    def _open(
        self,
        batch: Any,
        *,
        counts: bool = True,
        offset: int | None = None,
        largest: int | None = None,
        counted: Counted | None = None,
    ) -> OpenStep:
        """[1] Cut the batch into microbatches and send off how much this rank's share weighs, if that is not known.

        Where ranks meet in a forward, all run as many as the rank with the largest share: the others repeat one for
        nothing.
        """
        refuse_batch(batch, self._step)
        use_device(self.device)  # a step may be made in another thread than the one that prepared it
        batch = self.own_tokens(batch)
        if self._forward is not None and isinstance(self.objective, CrossEntropy):
            refuse_arguments(self._forward, batch)
            self._forward = None
        if isinstance(self.objective, CrossEntropy) and counts:
            self.objective.check(batch)
        weights = [float(self.objective.weight(part)) if counts else 0.0 for part in parts(batch, self.plan.mb)]
        offset = self.coordinate * length(batch) if offset is None else offset
        given, on_device = batch, to_device(batch, self.device, self.precision.wide_dtype)
        if self._composed is not None and self._composed.context is not None:
            mark_cut(on_device, self._composed.context)
        microbatches = parts(on_device, self.plan.mb)
        num_own = len(microbatches)
        if self._composed is not None and self._composed.has_collective_training_forward and largest and self.plan.mb:
            missing = -(-largest // self.plan.mb) - len(microbatches)
            microbatches, weights = microbatches + microbatches[:1] * missing, weights + [0.0] * missing
        self._step = self._new_step(
            on_device,
            microbatches,
            weights,
            counts=counts,
            offset=offset,
            largest=largest,
            num_own=num_own,
            counted=counted,
        )
        self._step.given = given if counts else None
        return self._step

    def _new_step(
        self,
        batch: Any,
        microbatches: list[Any],
        weights: list[float],
        *,
        counts: bool,
        offset: int,
        largest: int | None = None,
        num_own: int | None = None,
        counted: Counted | None = None,
    ) -> OpenStep:
        if self._composed is not None and self._composed.reducer is not None:
            self._composed.reducer.step = self.steps_done
        num_samples = float(length(batch)) if counts and batch is not None else float(counts)
        if counted is None:
            agreed = self.world.all_reduce_host([sum(weights), num_samples, *self.signals.values()])
        else:  # the same sums, without a message
            counted.check(sum(weights) * self.gradient_degree / self.degree, num_samples)
            repeats = self.world.size / self.gradient_degree, self.world.size / self.degree
            agreed = HostReduction.known([counted.num_labels * repeats[0], counted.batch * repeats[1]])
        return OpenStep(
            batch=batch,
            microbatches=microbatches,
            weights=weights,
            agreed=agreed,
            num_own=num_own if num_own is not None else len(microbatches),
            signals=tuple(self.signals) if counted is None else (),
            signals_with_loss=None if counted is None else self.signals,
            counts=counts,
            offset=offset,
            largest=largest,
        )

    def _begin(self, step: OpenStep, number: int, *stage: int) -> None:
        """Randomness in the model belongs to the samples, not to the rank that happens to compute them."""
        self._seed(self.steps_done, step.offset + number * (self.plan.mb or 0), *stage)
        if self.composed.balance is not None:
            self.composed.balance.factor = functools.partial(self._auxiliary_factor, step, number)
        if self.on_microbatch is not None:
            self.on_microbatch(number)

    def _factor_of_open_step(self) -> float:
        """In a loop of one's own that does not go through microbatches."""
        return 0.0 if self._step is None else self._auxiliary_factor(self._step, 0)

    def _auxiliary_factor(self, step: OpenStep, number: int) -> float:
        """What one sequence's auxiliary loss counts for: it is a mean over the sequences of the global batch."""
        is_stand_in = not step.counts or number >= step.num_own
        _, num_samples, *_ = step.agreed.wait()
        whole = num_samples * self.degree / self.world.size
        return 0.0 if is_stand_in else self.gradient_degree / whole * self.loss_scale.scale

    def _counts_like_data(self) -> bool:
        """Whether as many labels count as the data says, and nothing is gained by counting them on the way: a GPU
        computes while that number travels."""
        is_plain = isinstance(self.objective, CrossEntropy) and self.objective.rule.is_shifted is False
        return is_plain and self.device.type == "cpu" and self.world.size > 1

    def _counts_now(self) -> bool:
        """Whether the microbatch at hand has samples of this rank's own, and not a stand-in for none."""
        step = self._step
        return step is None or (step.counts and step.index < step.num_own)

    def _seed(self, *place: int) -> None:
        """Not torch.manual_seed, which formats a stack trace for devices that are not there: half a millisecond."""
        if self.mesh.degree("cp") > 1:  # the same samples, but other tokens of them
            place = (*place, self.mesh.coordinate["cp"])
        number = hashed_number(self.seed, *place)
        torch.default_generator.manual_seed(number)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(number)

    def _backward(self, loss: Tensor | Loss) -> None:
        """[2] Backward of this microbatch's part of the global loss."""
        step = self._step
        assert step is not None
        if isinstance(loss, Loss):
            step.kinds.add(loss.kind)
        total, is_alone = self._total_weight(step), self._is_alone(step)
        weight = total if is_alone else step.weight  # a mean that is alone is the loss, whatever its data weighs
        loss_sum = take(step, loss, max(step.index, 0), weight=weight, is_alone=is_alone)
        step.sums.append(loss_sum.detach() / total)
        is_counted = step.signals_with_loss is not None and not step.kinds
        if is_counted and step.index == len(step.microbatches) - 1 and step.message is None:
            # Beside the backward, in which a CPU waits for gradients anyway.
            step.message = LossMessage.send(self._own_loss(step), step.signals_with_loss, self.world.board)
        (loss_sum * self._factor()).backward()

    def _factor(self) -> float:
        """What the sum of losses of a microbatch counts for in the gradient."""
        assert self._step is not None
        return self.gradient_degree / self._total_weight(self._step) * self.loss_scale.scale

    def _total_weight(self, step: OpenStep) -> float:
        """What the whole global batch weighs. Every rank that sees the same samples has reported them once more."""
        total, num_samples, *signals = step.agreed.wait()
        self.agreed = dict(zip(step.signals, signals, strict=True))
        if total == 0 and self._is_estimated(step):
            total = num_samples
        if total == 0:
            raise ShoalError(
                "not one label of this global batch counts: all are -100",
                fix="mask less, or enlarge --data.global_batch",
            )
        return total * self.gradient_degree / self.world.size

    def _is_estimated(self, step: OpenStep) -> bool:
        """Whether what a batch weighs is no more than an estimate, which must not be 0."""
        if self.composed.pipeline is not None and not step.kinds:
            return isinstance(self.objective, MeanOf)
        return bool(step.kinds) and (self._is_alone(step) or step.kinds <= {Kind.COUNTED, Kind.PAIR})

    # ---- evaluation and the end ------------------------------------------------------------------------------------

    def evaluate(self, batches: Iterable[Any]) -> float:
        """The mean loss over batches that are dealt out over the ranks, each sample once; weights do not change."""
        loss = self.evaluate_unless(None, batches)
        assert loss is not None  # nobody could stop it
        return loss

    def evaluate_unless(self, stop: Callable[[], bool] | None, batches: Iterable[Any]) -> float | None:
        """The same; None on every rank, and the rest is left out, if `stop`, which every rank asks before each of its
        batches, says so on any of them."""
        use_device(self.device)
        self.settle()
        with self.composed.shared_weights():
            return evaluate(self, batches, stop)

    def meet(self) -> None:
        """Under sync=, let all islands meet now, at the end of a run, say; else nothing. Every rank calls it."""
        self.refuse_open_step("to meet")
        self.settle()
        if self.composed.islands is not None:
            self.composed.islands.exchange_all(self.steps_done)
            self.composed.before_evaluation()

    def own_tokens(self, batch: Any) -> Any:
        """With context parallelism, this rank's tokens of a batch; without it, or of what is cut already, the batch."""
        context = self._composed.context if self._composed is not None else None
        return batch if context is None else cut_batch(batch, self._description, context)

    def whole_tokens(self, x: Tensor, dim: int = 1) -> Tensor:
        """What every rank has computed for its own tokens (logits, say), for all tokens of the sequence, in order.
        Without context parallelism it is all there already. To look at: no gradient goes back through it."""
        context = self.composed.context
        return x.detach() if context is None else context.join(x.detach(), dim)

    def sum(self, *numbers: float) -> list[float]:
        """Each number summed over all ranks, for a validation of one's own; every rank must call it. Ranks that see the
        same tokens count once."""
        place = self.mesh.coordinate
        is_teller = place["tp"] == place["pp"] == 0
        return self.world.all_reduce_host(numbers if is_teller else [0.0] * len(numbers)).wait()

    def close(self) -> None:
        """Leave the world, if this run entered it."""
        try:
            if sys.exc_info()[0] is None:  # else the other ranks may not be there to be asked
                self.settle()
                self._finish_saves()
        finally:
            self.world.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.settle()
                self._finish_saves()
        finally:
            self.world.__exit__(kind, error, trace)

    def _finish_saves(self) -> None:
        if self._composed is not None:
            self._composed.close()
        for directory in self.savers:
            self.saved(directory)
