"""Reject mistakes of scripts that use a `Run`, each with the fix."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from shoal.blueprint.plan import Plan
from shoal.data.batch import length
from shoal.data.sharded_dataloader import ShardedDataLoader
from shoal.errors import Problem, ShoalError, nearest
from shoal.numerics.local_tensor import is_dtensor, is_fsdp
from shoal.parallel.parallel_model import ParallelModel
from shoal.train.build_model import describe
from shoal.train.loss.objective import LabelRule
from shoal.train.step.report import OpenStep

# ---- words of other systems -----------------------------------------------------------------------------------------

ARGUMENTS_ELSEWHERE = {  # of Accelerate, Fabric, DeepSpeed and the Trainer of transformers → what to type here
    "mixed_precision": "Run('bf16')",
    "precision": "Run('bf16')",
    "dtype": "Run('bf16')",
    "amp": "Run('bf16')",
    "bf16": "Run('bf16')",
    "fp16": "Run('fp16')",
    "gradient_accumulation_steps": "Run('mb=N'), N: a rank's samples, divided by that number",
    "accumulate_grad_batches": "Run('mb=N'), N: a rank's samples, divided by that number",
    "micro_batch_size": "Run('mb=4')",
    "train_micro_batch_size_per_gpu": "Run('mb=4')",
    "gradient_clipping": "Run(clip=1.0)",
    "gradient_clip_val": "Run(clip=1.0)",
    "max_grad_norm": "Run(clip=1.0)",
    "strategy": "Run('zero=3'), or another plan",
    **dict.fromkeys(("sharding_strategy", "fsdp", "fully_shard"), "Run('zero=3'); zero=2 is SHARD_GRAD_OP"),
    **dict.fromkeys(
        ("auto_wrap_policy", "wrap_policy", "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap"),
        "Run('zero=3', wrap_classes=('LlamaDecoderLayer',)), or wrap_min_params=100_000_000",
    ),
    "min_num_params": "Run('zero=3', wrap_min_params=100_000_000)",
    "limit_all_gathers": "Run('zero=3'): FSDP2 frees memory without stopping the host, so no setting limits gathers",
    "reshard_after_forward": "Run('zero=3'); zero=2 keeps parameters gathered until the backward",
    "mp_policy": "Run('zero=3 bf16'), which reduces gradients in float32, or in bfloat16 by reduce_dtype='bf16'",
    **dict.fromkeys(("cpu_offload", "offload_policy"), "Run('zero=3 offload=parameters')"),
    **dict.fromkeys(("sync_module_states", "use_orig_params"), "Run('zero=3'), which needs no such setting"),
    "weights": "Run(param_dtype='bf16')",
    "states": "shoal.AdamW(..., state_dtype='bf16')",
    "state_dtype": "shoal.AdamW(..., state_dtype='bf16')",
    "remake_gates": "Run(recompute_swiglu=False)",
    "find_unused": "Run(find_unused_parameters=True)",
    "fsdp": "Run('zero=3')",
    "fsdp_plugin": "Run('zero=3')",
    "deepspeed": "Run('zero=2')",
    "deepspeed_plugin": "Run('zero=2')",
    "zero_stage": "Run('zero=2')",
    "zero_optimization": "Run('zero=2')",
    "tensor_parallel_size": "Run('tp=2')",
    "pipeline_parallel_size": "Run('pp=2 mb=1')",
    "devices": "torchrun --nproc-per-node 2 script.py",
    "num_processes": "torchrun --nproc-per-node 2 script.py",
    "num_nodes": "torchrun --nnodes 2 ...",
    "accelerator": "Run(device='cuda')",
    "cpu": "Run(device='cpu')",
    "gradient_checkpointing": "Run('recompute=full')",
    "activation_checkpointing": "Run('recompute=full')",
    "gradient_as_bucket_view": "leave it out: it is always so",
    "loss_fn": "Run(loss=lambda model, batch: ...)",
    "criterion": "Run(loss=lambda model, batch: ...)",
}


def check_options(unknown: Mapping[str, Any], known: Iterable[str]) -> Iterator[Problem]:
    """Arguments that a run does not have; `known` are those that it has."""
    for name, value in unknown.items():
        near = nearest(name, set(known))
        fix = ARGUMENTS_ELSEWHERE.get(name) or (
            f"Run({near}={value!r})" if near else "help(shoal.Run), which lists them"
        )
        yield Problem("R046", f"Run has no argument {name} (={value!r})", fix)


def reject_several(others: tuple[Any, ...]) -> None:
    """A batch in several arguments."""
    if others:
        raise ShoalError(
            f"run.step takes one batch, and got {1 + len(others)} arguments",
            fix="run.step((x, y)), or run.step({'x': x, 'labels': y}) with the names of the model's arguments",
            code="T001",
        )


def reject_arguments(forward: inspect.Signature, batch: Any) -> None:
    """A batch whose names are not those of the model's arguments."""
    if not isinstance(batch, Mapping) or "labels" not in batch:
        return
    given = [str(name) for name in batch if name != "labels"]
    try:
        forward.bind(**dict.fromkeys(given), **({"labels": None} if "labels" in forward.parameters else {}))
    except TypeError as error:
        takes = ", ".join(str(parameter) for parameter in forward.parameters.values())
        raise ShoalError(
            f"the model's forward({takes}) cannot be called with the batch's {', '.join(given) or 'nothing'}: {error}",
            fix=f"def forward(self, {', '.join(given)}), or Run(loss=lambda model, batch: ...), which calls the model",
            code="M057",
        ) from None


# ---- what is prepared ------------------------------------------------------------------------------------------------


def check_second(kind: str, first: object) -> Iterator[Problem]:
    """A second model, or a second optimizer."""
    if first is None:
        return
    of_parts = (
        "one optimizer with a group for each part: torch.optim.AdamW([{'params': a, 'lr': 1e-3}, {'params': b}]); or,"
        " for another model, a Run of its own: Run(..., world=run.world)"
    )
    of_models = f"one Run for each {kind}, sharing the ranks: Run(..., world=run.world); or one nn.Module around both"
    yield Problem(
        "T002",
        f"this run has one {kind} already: it clips, scales and synchronises that one only",
        of_parts if kind == "optimizer" else of_models,
    )


def check_wrapped(model: nn.Module) -> Iterator[Problem]:
    """A model, or a module of it, that another system has laid over devices or ranks already."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrappers = (nn.DataParallel, DistributedDataParallel, *([fsdp.FullyShardedDataParallel] if fsdp else []))
    for name, module in model.named_modules():
        where = f"the model's {name!r}" if name else "this model"
        inner = f"model.{name}" if name else "model"
        if isinstance(module, wrappers):
            yield Problem(
                "M058",
                f"{where} is in torch's {type(module).__name__}, and a run lays a model over its ranks by itself",
                f"run.prepare the module without the wrapper: {inner}.module in place of {inner}",
            )
            return
        if is_fsdp(module) or any(is_dtensor(p) for p in module.parameters(recurse=False)):
            yield Problem(
                "M058",
                f"{where} was given to fully_shard or parallelize_module, and a run lays models over ranks by itself",
                "run.prepare(model) of the model as it was built, and the layout in the plan: Run('zero=3')",
            )
            return


def check_compiled(model: nn.Module) -> Iterator[Problem]:
    """Of what torch.compile returns, modules have other names than the model itself describes."""
    if hasattr(model, "_orig_mod") and describe(model).blocks:
        yield Problem(
            "M059",
            "this model was given to torch.compile before, as a whole, and its blocks cannot be found in it",
            "give prepare the model itself, and let the run compile its blocks: Run(compile=True)",
        )


def rule_under(plan: Plan, rule: LabelRule) -> LabelRule:
    """What a model that takes labels does with them, where its own loss cannot be looked at."""
    axis = next((axis for axis in ("pp", "cp") if plan.layout.degree(axis) > 1), None)
    if rule.is_shifted is not None or axis is None:
        return rule
    raise ShoalError(
        f"this model takes labels, may compute a loss from them itself and shift them, which cannot be seen under"
        f" {axis}={plan.layout.degree(axis)}",
        fix=f"Run(loss=lambda model, batch: ...), with labels that fit the model's logits; or {axis}=1",
        code="T004",
    )


# ---- one step --------------------------------------------------------------------------------------------------------


def reject_own_loop(composed: ParallelModel) -> None:
    """Forwards and backwards of a script's own, where there is no order to make them in."""
    if composed.pipeline is not None:
        raise ShoalError(
            "a pipeline runs the forwards and backwards of all microbatches in an order of its own",
            fix="run.step(batch), with loss= given to the Run",
            code="T005",
        )


def reject_unknown_batch(composed: ParallelModel) -> None:
    """A backward out of nowhere, where it has to be known whose tokens these are, and of how many sequences."""
    for what, is_used in (
        ("a model with routers of experts", composed.balance is not None),
        (f"cp={composed.mesh.degree('cp')}", composed.context is not None),
    ):
        if is_used:
            raise ShoalError(
                f"with {what}, a backward has to know the batch that it belongs to",
                fix="for batch in run.batches(loader): ..., or run.step(batch)",
                code="T006",
            )


def reject_unprepared(loader: Iterable[Any], num_ranks: int) -> None:
    """A DataLoader of which every rank would take whole batches of its own, in its own order."""
    if num_ranks == 1 or not isinstance(loader, DataLoader):
        return
    if type(loader.sampler) in (SequentialSampler, RandomSampler):  # another one may know of ranks
        raise ShoalError(
            f"this DataLoader is not prepared: each of {num_ranks} ranks would take whole batches of its own",
            fix="loader = run.prepare(loader)",
            code="D035",
        )


def reject_direct_loop(loaders: Iterable[ShardedDataLoader]) -> None:
    """Ranks that share a batch, each of which goes through its loader by itself."""
    if any(loader.is_iterated_directly for loader in loaders):
        raise ShoalError(
            "this loop takes batches from the loader itself; where the last batch has fewer samples than there"
            " are ranks, some ranks would take a step less and the others wait for ever",
            fix="for batch in run.batches(loader): run.step(batch), or run.backward(loss) and run.update() in place of"
            " loss.backward() and optimizer.step()",
            code="D036",
        )


def reject_own_update(step: OpenStep | None) -> None:
    """A step of the optimizer by the script, with a batch of `run.batches`: nothing is weighed, clipped or counted."""
    if step is not None:
        raise ShoalError(
            "optimizer.step() was called in place of run.update(), which weighs, clips and counts the step",
            fix="run.step(batch); or run.backward(loss) and run.update() in place of loss.backward() and"
            " optimizer.step()",
            code="T040",
        )


def reject_batch(batch: Any, before: OpenStep | None) -> None:
    """One that comes too soon, or has nothing in it."""
    if before is not None and before.has_begun:
        raise ShoalError(
            "the batch before this one was not finished: backward without update()",
            fix="run.update() after each batch; to accumulate, say mb= in the plan and loop over run.microbatches",
            code="T007",
        )
    if not length(batch):
        raise ShoalError(
            "this batch has no samples",
            fix="samples for every rank: for batch in run.batches(loader): ...",
            code="T008",
        )


def reject_open(step: OpenStep | None, why: str) -> None:
    """Whatever must not come between a batch that was taken and its update."""
    if step is not None:
        raise ShoalError(
            f"{why} in the middle of a step would lose its samples, and the gradients that it has summed up",
            fix="run.step(batch), or run.update(), first",
            code="T009",
        )


def reject_routers_with_deferred_count(correction: Tensor) -> None:
    """Auxiliary losses are a mean over sequences: a count of other things cannot correct their gradients."""
    if not math.isclose(float(correction), 1.0, rel_tol=1e-9):
        raise ShoalError(
            "with a model with routers of experts, a loss has to be a mean over the labels that are not -100 (or over"
            " samples, in a batch without labels), since auxiliary losses are divided by another number",
            fix="Run(loss=objective), an object with weight(batch) and loss_sum(model, batch, weight)",
            code="T010",
        )


def with_all_backwards(step: OpenStep | None) -> OpenStep:
    """The step, whose backwards were all made; an update that comes before is rejected."""
    if step is None or not step.has_begun:
        raise ShoalError(
            "update() without a backward", fix="call run.backward(loss) first, or run.step(batch)", code="T011"
        )
    if step.index >= 0 and len(step.sums) < len(step.microbatches):
        raise ShoalError(
            f"{len(step.sums)} of {len(step.microbatches)} microbatches had a backward, and gradients are"
            " synchronised in that of the last",
            fix="for microbatch in run.microbatches(batch): ... run.backward(loss), to its end, then run.update()",
            code="T011",
        )
    return step
