"""Sections of a config that are features of their own: parallelism, recomputation, monitors, and what shoal lacks."""

from __future__ import annotations

from shoal.config.deepspeed.data_types import IN_FLOAT32
from shoal.config.deepspeed.translation import Reader

OBSERVE = "metrics.jsonl and `shoal profile` have it"
INTERNAL = "an internal of DeepSpeed"
NO_EFFECT = {
    **dict.fromkeys(
        ("wall_clock_breakdown", "memory_breakdown", "flops_profiler", "comms_logger", "timers", "csv_monitor"), OBSERVE
    ),
    **dict.fromkeys(
        (
            *("dump_state", "log_level", "vocabulary_size", "graph_harvesting", "disable_allgather", "aio"),
            "disable_python_gc",
        ),
        INTERNAL,
    ),
    **dict.fromkeys(
        ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"), "any optimizer of torch is taken"
    ),
    **dict.fromkeys(
        ("prescale_gradients", "gradient_predivide_factor"), "gradients are averaged in float32, the mean is the same"
    ),
    **dict.fromkeys(("communication_data_type", "seq_parallel_communication_data_type"), IN_FLOAT32),
    "checkpoint": "checkpoints load on any layout, and each has one manifest",
    "use_data_before_expert_parallelism": "the layout places the ranks",
}
"""Key → why it has no effect."""

NEVER = 2**31
"""Steps between two lines that no run makes."""
TRACKED = "the name of the run is --run.name; other keys of this section have no effect"
IF_ENABLED = {
    "elasticity": "remove it; --min-hosts N or `shoal agent` continue with fewer hosts at the same global batch",
    "autotuning": "remove it; `shoal plan MODEL --cluster CLUSTER` ranks all plans",
    "hybrid_engine": "remove it",
    "compression_training": "remove it",
    "weight_quantization": "remove it; --model.lora.base nf4 packs frozen weights",
    "curriculum_learning": "remove it",
    "data_efficiency": "remove it; data.source with several sources mixes data",
    "eigenvalue": "remove it",
    "progressive_layer_drop": "remove it",
    "nebula": "remove it; checkpoints are written beside the training anyway",
    "datastates_ckpt": "remove it; checkpoints are written beside the training anyway",
    "expert_parallel": "remove it; --plan.ep 2 divides the experts",
    "comet": 'remove it; "wandb" or "tensorboard" are trackers here',
}
"""Section → what to do in its place, if it is enabled."""


COMPILED_OFFLOAD = {
    "offload_activation": "--plan.recompute full stores least",
    "offload_opt_states": '"offload_optimizer": {"device": "cpu"} of zero_optimization is the nearest',
    "offload_parameters": '"offload_param": {"device": "cpu"} of zero_optimization is the nearest',
}
"""Switches of `compile` that change what is in the memory of a device → the nearest thing."""
_COMPILE = """
    enabled backend kwargs deepcompile free_activation free_activation_threshold offload_activation_pin_memory
    double_buffer symmetric_memory debug_log sync_before_reduce sync_after_reduce sync_before_allgather
    sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes
"""
"""Keys of `compile`, of which the first three are of older versions."""


def translate_features(reader: Reader) -> None:
    """All sections of this file."""
    for key, why in NO_EFFECT.items():
        reader.no_effect(key, why)
    for key, fix in IF_ENABLED.items():
        _reject_enabled(reader, key, fix)
    if reader.has("sparse_attention"):
        reader.reject("sparse_attention", "remove it; data.mask_documents limits attention to documents")
    if reader.flag("sparse_gradients"):
        reader.reject("sparse_gradients", '"sparse_gradients": false')
    if reader.word("gradient_allreduce_op", ("mean", "sum")) == "sum":
        reader.reject("gradient_allreduce_op", '"gradient_allreduce_op": "mean"', "gradients are averaged over ranks")
    if reader.flag("managed_gradient_accumulation") is False:
        fix = '"managed_gradient_accumulation": true; or shoal.Run, whose update() is called by the script'
        reader.reject("managed_gradient_accumulation", fix)
    if reader.flag("dataloader_drop_last") is not None:
        is_engine = reader.into.target == "initialize"
        reader.same("dataloader_drop_last", "the same here" if is_engine else "every global batch is whole")
    _observers(reader)
    _recompute(reader)
    _compile(reader)


def _reject_enabled(reader: Reader, key: str, fix: str) -> None:
    """A section that shoal has not; without effect unless it is enabled."""
    value = reader.values.get(key)
    if not reader.has(key):
        return
    is_off = not value or (isinstance(value, dict) and not _is_enabled(value))
    if is_off:
        reader.no_effect(key, "it is not enabled")
    else:
        reader.reject(key, fix)


def _is_enabled(section: dict[str, object]) -> bool:
    """Whether a section, or a section inside, is enabled. One without that key is, since it is there."""
    flags = [value for key, value in section.items() if key == "enabled"]
    shared = section.get("shared_parameters")  # says it for the groups beside it, which have no such word
    inside = [shared] if isinstance(shared, dict) else section.values()
    inner = [_is_enabled(value) for value in inside if isinstance(value, dict)]
    return any(flags) if flags else any(inner) if inner else True


def _observers(reader: Reader) -> None:
    """Metrics and their trackers."""
    is_recipe = reader.into.target == "train"
    is_never = reader.values.get("steps_per_print") == float("inf")  # as Accelerate writes it
    every = NEVER if is_never else reader.whole("steps_per_print")
    if every is not None and is_recipe:
        reader.setting("steps_per_print", "run.log_every", min(every, NEVER))
    elif every is not None:
        reader.same("steps_per_print", "no effect here: the script prints")
    trackers = []
    for key in ("tensorboard", "wandb"):
        section = reader.values.get(key)
        if not reader.has(key):
            continue
        is_on = isinstance(section, dict) and section.get("enabled") is True
        if is_on and is_recipe:
            trackers.append(key)
            reader.setting(key, "run.trackers", list(trackers), TRACKED)
        else:
            reader.same(key, "no effect here: the script logs" if is_on else "no effect here: it is not enabled")


def _recompute(reader: Reader) -> None:
    """DeepSpeed's section changes `deepspeed.checkpointing.checkpoint`, which a model has to call; shoal recomputes."""
    section = reader.section("activation_checkpointing")
    if section is None:
        return
    if section.flag("cpu_checkpointing"):
        section.reject("cpu_checkpointing", '"cpu_checkpointing": false; --plan.recompute full stores least')
    calls = "the model of the script calls checkpoint itself"
    if section.flag("partition_activations") and reader.into.target != "initialize":
        section.plan("partition_activations", "recompute", "full", "whole blocks are computed again")
    elif section.has("partition_activations"):
        section.same("partition_activations", f"no effect here: {calls}; --plan.recompute full")
    keys = ("contiguous_memory_optimization", "number_checkpoints", "synchronize_checkpoint_boundary", "profile")
    for key in keys:
        section.no_effect(key, INTERNAL)
    section.finish()


def _compile(reader: Reader) -> None:
    section = reader.section("compile")
    if section is None:
        return
    if section.flag("deepcompile") and reader.into.target != "plan":
        section.setting("deepcompile", "run.compile", True, "each block under torch.compile")
    for key, fix in COMPILED_OFFLOAD.items():
        if section.flag(key):
            section.reject(key, f'"{key}": false; {fix}')
    for key in _COMPILE.split():
        if not any(line.key == section.name(key) for line in reader.into.lines):
            section.no_effect(key, "--run.compile true compiles each block")
    section.finish()
