"""Place a model, its optimizer, schedulers and loaders on the ranks of a run."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal.blueprint.description import Description
from shoal.checkpoint.formats.adapter import fill_adapter
from shoal.checkpoint.formats.start_weights import StartWeights, start_weights_of
from shoal.checkpoint.load_tensors import load_tensors
from shoal.checkpoint.state.model_state import Holder
from shoal.comm.all_or_none import all_or_none
from shoal.data.sharded_dataloader import ShardedDataLoader
from shoal.errors import Findings, Problem, raise_if
from shoal.numerics.init import init_missing
from shoal.numerics.local_tensor import to_local
from shoal.numerics.offload.host_copies import HostCopies
from shoal.numerics.optim.build import memory_of_squares, use_fused_kernels
from shoal.parallel.checks import why_loss_not_fused
from shoal.parallel.compose import compose
from shoal.parallel.parallel_model import ParallelModel
from shoal.parallel.pipeline.skeleton import Call
from shoal.safe_parsing import short
from shoal.train.build_model import adapt, adapter_of, describe, from_pretrained, is_name
from shoal.train.checks import check_compiled, check_second, check_wrapped, rule_under
from shoal.train.loss.objective import CrossEntropy, LabelRule, MeanOf, call_of
from shoal.train.optim.checks import check_rounding, check_shards, check_whole
from shoal.train.rebind_optimizer import rebind_optimizer
from shoal.train.run_checkpoint import loader_changes
from shoal.train.run_state import RunState
from shoal.train.schedulers import check_optimizer, encoded_state, is_scheduler
from shoal.train.step.engine import StepEngine
from shoal.train.trace.find_blocks import attach_blocks


def prepare(engine: StepEngine, things: tuple[Any, ...]) -> tuple[Any, ...]:
    """The things as the run of this engine takes them, in their order. Models are placed before all else."""
    things = tuple(_with_model(engine.state, thing) for thing in things)
    found = Findings()
    for thing in things:
        found += _check(engine.state, thing)
    raise_if(found.problems)
    loader = next((thing for thing in things if isinstance(thing, DataLoader)), None)
    for model in (thing for thing in things if isinstance(thing, nn.Module)):
        attach_blocks(model, engine.state.plan.layout.pp, functools.partial(_first_call, engine.state, loader))
    models = {id(thing): _prepare_model(engine, thing) for thing in things if isinstance(thing, nn.Module)}
    return tuple(models[id(thing)] if id(thing) in models else _prepare(engine, thing) for thing in things)


def _with_model(state: RunState, thing: Any) -> Any:
    """The model without memory that a name such as `hf:FOLDER` stands for; any other thing as it is."""
    if not is_name(thing) or state.parallel_model is not None:
        return thing
    models: list[nn.Module] = []
    failed, fix = f"no model was built from {thing}", "a folder that every rank can read"
    all_or_none(state.world, lambda: models.append(from_pretrained(thing)), failed=failed, fix=fix)
    return models[0]


def _first_call(state: RunState, loader: DataLoader[Any] | None) -> Call | None:
    """The arguments of the model for two samples of a loader; None: there is none whose samples can be read in any
    order."""
    if loader is None or not isinstance(loader.dataset, Sized) or loader.collate_fn is None:
        return None
    samples = [loader.dataset[number] for number in range(min(2, len(loader.dataset)))]
    return call_of(state.objective, loader.collate_fn(samples))


def _check(state: RunState, thing: Any) -> Iterator[Problem]:
    """Problems of one thing that are found before any is placed."""
    if isinstance(thing, nn.Module):
        yield from check_second("model", state.parallel_model)
        yield from check_wrapped(thing)
        yield from check_compiled(thing)
    elif isinstance(thing, Optimizer):
        yield from check_second("optimizer", state.prepared_optimizer)
        yield from check_rounding(thing, state.precision.weight_dtype)
        yield from check_whole(thing, state.plan)
        yield from check_shards(thing, state.plan, is_copied=_copies_to_host(state))
    elif is_name(thing):
        yield from check_second("model", state.parallel_model)
    elif not isinstance(thing, DataLoader) and not is_scheduler(thing):
        what, fix = (
            f"a {type(thing).__name__}",
            "run.prepare(model, optimizer, scheduler, loader); keep the rest as it is",
        )
        if isinstance(thing, str):
            what, fix = f"the text {short(thing)}", "run.prepare('hf:FOLDER'), the folder of a model of transformers"
        yield Problem("T029", f"prepare cannot place {what}", fix)


def _prepare(engine: StepEngine, thing: Any) -> Any:
    if isinstance(thing, Optimizer):
        return _prepare_optimizer(engine, thing)
    if isinstance(thing, DataLoader):
        return _prepare_loader(engine.state, thing)
    return _prepare_scheduler(engine.state, thing)


def _tell_of_rounding(state: RunState, model: nn.Module) -> None:
    """Say once that weights lose precision, which the plan decides."""
    is_rounded = state.precision.wide_dtype != torch.float64 and state.world.rank == 0
    if is_rounded and any(parameter.dtype == torch.float64 for parameter in model.parameters()):
        text = "weights in float64 become float32, since the plan decides the precision: fp64 in it keeps them"
        logging.getLogger("shoal").warning(text)


def _prepare_model(engine: StepEngine, model: nn.Module) -> nn.Module:
    state = engine.state
    raise_if(check_second("model", state.parallel_model))  # of two in one call
    start = start_weights_of(model)
    init_missing(model, state.seed)
    description = describe(model)
    rule = _label_rule(state, model, description)
    _tell_of_rounding(state, model)
    state.fused_layers = adapt(model, description, state.plan, fused=_fuses_layers(state))
    if state.fused_layers is not None and state.world.rank == 0:
        logging.getLogger("shoal").info(state.fused_layers)
    state.unchecked_forward = inspect.signature(model.forward)
    composed = state.parallel_model = compose(
        model,
        state.plan,
        description=description,
        mesh=state.mesh,
        tensor=state.tensor,
        precision=state.precision,
        policies=state.policies,
    )
    state.description, state.model_section = description, getattr(model, "model_section", None)
    _load_start_weights(state, start, getattr(model, "adapter_to_load", None), composed)
    composed.replicas.keeps_nonfinite = state.updates.keeps_nonfinite
    if composed.reducer is not None:
        composed.reducer.may_be_dropped = state.updates.on_nan == "skip"
    if composed.balance is not None:
        composed.balance.factor = engine.factor_of_open_step
    if composed.batch_norm is not None:
        composed.batch_norm.counts = engine.counts_now
    if isinstance(state.objective, CrossEntropy):
        state.objective = CrossEntropy(composed.tensor, composed.head, rule_under(state.plan, rule))
    if isinstance(state.objective, MeanOf):
        state.objective.is_compiled = bool(state.policies.compute.compile)
    if state.prepared_optimizer is not None:
        _give_parameters(state, state.prepared_optimizer, composed)
    return composed.model


def _load_start_weights(
    state: RunState, start: StartWeights | None, adapter: str | None, composed: ParallelModel
) -> None:
    """Fill the pieces of this rank from the files that a model without memory starts with."""
    if start is not None:
        load_tensors(state.world, Holder(composed), start.tensors, start.where)
    if adapter is not None:
        failed, fix = f"{adapter} was not loaded", "--model.lora.adapter FOLDER, which every rank can read"
        all_or_none(state.world, lambda: fill_adapter(composed, adapter), failed=failed, fix=fix)


def _label_rule(state: RunState, model: nn.Module, description: Description) -> LabelRule:
    """What a model does with labels. In a pipeline, and where tokens are divided, its adapter has to know. With a fused
    loss it should: the first batch would have all logits."""
    rule, layout = LabelRule.of(model), state.plan.layout
    adapter = adapter_of(model)
    if rule.is_shifted is not None or adapter is None or not isinstance(state.objective, CrossEntropy):
        return rule
    if layout.pp == layout.cp == 1 and not _computes_loss_in_head(state, model, description):
        return rule
    is_shifted = adapter.shifts_labels(model, description)
    if is_shifted and layout.cp > 1:  # before tokens are cut: the last token of a rank has its label on another
        state.shifts_labels, is_shifted = True, False
    return LabelRule(rule.needs, is_shifted)


def _fuses_layers(state: RunState) -> bool:
    """Whether layers are swapped. Unless it is said, on a GPU: a CPU gains no time."""
    wanted = state.policies.compute.fused_layers
    return state.device.type == "cuda" if wanted is None else wanted


def _computes_loss_in_head(state: RunState, model: nn.Module, description: Description) -> bool:
    wanted = state.policies.compute.fused_loss
    is_large = wanted or (wanted is None and state.device.type == "cuda")
    return bool(is_large) and why_loss_not_fused(model, state.plan, description) is None


def _prepare_optimizer(engine: StepEngine, optimizer: Optimizer) -> Optimizer:
    state = engine.state
    raise_if(check_second("optimizer", state.prepared_optimizer))  # of two in one call
    for scheduler in state.schedulers:
        check_optimizer(scheduler, optimizer)
    optimizer.register_step_pre_hook(engine.before_optimizer)
    state.prepared_optimizer = optimizer
    if state.parallel_model is not None:
        _give_parameters(state, optimizer, state.parallel_model)
    return optimizer


def _give_parameters(state: RunState, optimizer: Optimizer, composed: ParallelModel) -> None:
    """Let an optimizer hold what became of its parameters; under offload, copies of it in host memory."""
    rebind_optimizer(optimizer, composed)
    if composed.local_sgd is not None:
        composed.local_sgd.rescale(memory_of_squares(optimizer), next(iter(composed.named.values())))
    if state.plan.offload != "none":
        use_fused_kernels(optimizer)
    folder = state.plan.offload_folder
    state.host_copies = HostCopies(optimizer, to_local, folder=folder) if _copies_to_host(state) else None


def _copies_to_host(state: RunState) -> bool:
    """Whether the optimizer will hold copies of its parameters: in host memory, or with states in files."""
    return state.plan.offloaded == "optimizer" and (state.device.type != "cpu" or state.plan.offload_folder is not None)


def _prepare_loader(state: RunState, loader: DataLoader[Any]) -> ShardedDataLoader:
    sharded = ShardedDataLoader(loader, seed=state.seed, coordinate=state.coordinate, degree=state.degree)
    sharded.cut = state.own_tokens
    sharded.needs_equal_steps = lambda: state.parallel_model is not None and state.parallel_model.has_collective_forward
    number = len(state.loaders)
    if number < len(state.saved_loaders):  # a run was loaded that had it
        known = state.saved_loaders[number]
        raise_if(loader_changes(number, known, sharded))
        sharded.position = tuple(known["position"])
    state.loaders.append(sharded)
    return sharded


def _prepare_scheduler(state: RunState, scheduler: Any) -> Any:
    check_optimizer(scheduler, state.prepared_optimizer)
    encoded_state(scheduler)  # rejects now what a save would reject later
    if all(scheduler is not known for known in state.schedulers):
        state.schedulers.append(scheduler)
    return scheduler
