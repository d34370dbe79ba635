"""Members of DeepSpeed's engine and package that shoal does not have, each with what is in its place."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.errors import Problem, ShoalError, nearest

STEP = "nothing: engine.step() does it"
METRICS = "engine.get_lr(), engine.get_global_grad_norm() and `shoal profile`"
OF_ENGINE = {
    "allreduce_gradients": "nothing: engine.backward(loss) averages gradients over ranks",
    "buffered_allreduce_fallback": "nothing: engine.backward(loss) averages gradients over ranks",
    "coalesce_grad_reduction": "engine.no_sync() around all forwards and backwards of a step but the last",
    "scale": "engine.backward(loss), which scales the loss",
    "clip_fp32_gradients": '"gradient_clipping": 1.0 in the config',
    "offload_states": '"offload_optimizer": {"device": "cpu"} of zero_optimization in the config',
    "reload_states": '"offload_optimizer": {"device": "cpu"} of zero_optimization in the config',
    "load_module_state_dict": "model.load_state_dict(...) before initialize; or engine.load_checkpoint(...)",
    "flops_profiler": "`shoal profile`",
    "monitor": METRICS,
    "timers": METRICS,
    "tput_timer": METRICS,
    "get_wall_clock_timers": METRICS,
    "random_ltd_scheduler": "a schedule in the script",
    "set_custom_curriculum_learning_schedule": "a schedule in the script",
    "set_data_post_process_func": "collate_fn=... of initialize",
    "data_parallel_group": 'engine.run.mesh.group("dp_cp")',
    "basic_optimizer": "engine.optimizer, which is torch's own",
    "client_optimizer": "engine.optimizer",
    "client_lr_scheduler": "engine.lr_scheduler",
    "checkpoint_engine": "engine.save_checkpoint and engine.load_checkpoint",
}
"""A member of DeepSpeed's engine → what is in its place. One of the model's with this name is not meant."""

OF_PIPELINES = {
    "train_batch": "shoal.Run('pp=2 mb=1') with run.step(batch)",
    "eval_batch": "shoal.Run('pp=2 mb=1') with run.evaluate(batches)",
}
"""The same of an engine with stages, unless the model has it."""

OF_CONFIG = {
    "zero_": 'engine.config["zero_optimization"]',
    "flops_profiler_": 'engine.config["flops_profiler"]',
    "autotuning_": 'engine.config["autotuning"]',
    "curriculum_": 'engine.config["curriculum_learning"]',
    "data_": 'engine.config["data_efficiency"]',
    "checkpoint_": 'engine.config["checkpoint"]',
    "bf16_": 'engine.config["bf16"]',
    "fp16_": 'engine.config["fp16"]',
    "torch_autocast_": 'engine.config["torch_autocast"]',
}
"""The begin of a getter of DeepSpeed's engine → the section that it reads."""

OF_PACKAGE = {
    "zero": "build the model as usual; engine.run.weights() has whole weights",
    "comm": "torch.distributed",
    "dist": "torch.distributed",
    "ops": "torch.optim.AdamW, or the optimizer of the config",
    "checkpointing": "torch.utils.checkpoint",
    "accelerator": "torch.accelerator",
    "get_accelerator": "torch.accelerator",
    "pipe": "shoal.Run('pp=2 mb=1') with run.step(batch)",
    "PipelineModule": "shoal.Run('pp=2 mb=1') with run.step(batch)",
    "PipelineEngine": "shoal.Run('pp=2 mb=1') with run.step(batch)",
    "moe": "shoal.Run('ep=2') with a model that has experts",
    "sequence": "shoal.Run('cp=2 ulysses') with run.batches",
    "init_inference": "shoal generate",
    "InferenceEngine": "shoal generate",
    "tp_model_init": '"tensor_parallel": {"autotp_size": 2} in the config',
    "DeepSpeedEngine": "shoal.deepspeed.Engine",
    "DeepSpeedConfig": "the dict or the file of the config, for initialize(config=...)",
    "utils": "engine.run.weights() has whole weights, and the standard library logs",
    "log_dist": "print(...) if engine.global_rank == 0",
    "runtime": "shoal.deepspeed.WarmupLR and its like; the rest is internal to DeepSpeed",
    "profiling": "`shoal profile`",
    "monitor": METRICS,
    "OnDevice": 'with torch.device("meta"), around the model',
    "DeepSpeedTransformerLayer": "torch.nn.TransformerEncoderLayer",
}
"""A name of the package → what is in its place."""


class MissingMember(ShoalError, AttributeError):
    """A name that DeepSpeed has and shoal has not; `hasattr` is False for it."""


def missing(owner: str, name: str, instead: Mapping[str, str], known: Iterable[str]) -> MissingMember:
    """The error of a name: what is in its place, or the known name that is most similar."""
    near = nearest(name, known)
    section = next((text for begin, text in OF_CONFIG.items() if owner == "engine" and name.startswith(begin)), None)
    close = f"{owner}.{near}" if near else "remove it; docs/deepspeed.md lists what there is"
    fix = instead.get(name) or section or close
    return MissingMember(f"{owner} has no {name!r}", fix=fix, code="E018")


def reject_unknown(method: str, given: Mapping[str, Any], usual: Mapping[str, Any], known: Iterable[str] = ()) -> None:
    """Reject arguments that a method does not have. `usual`: those of other versions → the value that has no effect."""
    wrong = [name for name, value in given.items() if name not in usual or value != usual[name]]
    if not wrong:
        return
    names = [*usual, *known]
    raise ShoalError(
        *(
            Problem("E018", f"engine.{method} has no {name}={given[name]!r:.60}", _fix(method, name, names, usual))
            for name in wrong
        )
    )


def _fix(method: str, name: str, names: list[str], usual: Mapping[str, Any]) -> str:
    near = None if name in usual else nearest(name, names)
    return f"engine.{method}(..., {near}=...)" if near else f"leave {name} out"


def arguments(function: Any) -> list[str]:
    """The names of the arguments of a method."""
    return [name for name in inspect.signature(function).parameters if name != "self"]
