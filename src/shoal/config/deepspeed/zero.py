"""`zero_optimization`: the stage, offload, and the settings of DeepSpeed's own buffers."""

from __future__ import annotations

from shoal.config.deepspeed.translation import Reader
from shoal.errors import Problem

OWN_BUFFERS = "shoal sizes its own buckets"
FSDP = "one unit is gathered ahead, the blocks of the model"
NO_EFFECT = {
    **dict.fromkeys(
        ("reduce_bucket_size", "allgather_bucket_size", "use_multi_rank_bucket_allreduce", "sub_group_size"),
        OWN_BUFFERS,
    ),
    **dict.fromkeys(("overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions"), "always so"),
    **dict.fromkeys(("round_robin_gradients", "memory_efficient_linear", "legacy_stage1"), "an internal of DeepSpeed"),
    **dict.fromkeys(
        (
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_module_granularity_threshold",
            "stage3_use_all_reduce_for_fetch_params",
            "stage3_allgather_sequential",
            "leaf_module",
        ),
        FSDP,
    ),
    **dict.fromkeys(
        ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
        "save_16bit_model and `shoal checkpoint export` always gather",
    ),
    **dict.fromkeys(("ignore_unused_parameters",), "parameters without a gradient keep their values"),
    **dict.fromkeys(
        ("load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint"),
        "checkpoints hold float32 weights and load on any layout",
    ),
    **dict.fromkeys(
        (
            "override_module_apply",
            "log_trace_cache_warnings",
            "enable_sanity_checks",
            "parameter_alignment",
            "save_muon_momentum_buffer_in_memory",
        ),
        "an internal of DeepSpeed",
    ),
    **dict.fromkeys(("compute_grad_norm",), "the norm is always computed"),
    **dict.fromkeys(("mics_hierarchical_params_gather",), "the collectives of torch choose their algorithm"),
}
QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
WORDS = {"optimizer": "optimizer", "param": "parameters"}
"""What DeepSpeed offloads → the word of a plan."""


def translate_zero(reader: Reader, num_ranks: int | None) -> None:
    """The stage becomes `zero=`, over all data-parallel ranks as in DeepSpeed."""
    if not reader.has("zero_optimization"):
        return
    if isinstance(was := reader.values["zero_optimization"], bool):  # as in 2020: DeepSpeed still reads it
        zero = Reader({"stage": int(was)}, reader.into, "zero_optimization.")
        reader.same("zero_optimization", f"as stage {int(was)}")
    else:
        zero = reader.section("zero_optimization") or Reader({}, reader.into, "zero_optimization.")
    stage = zero.whole("stage", least=0) if "stage" in zero.values else 0
    if stage is not None and stage > 3:
        reader.into.problems.append(
            Problem("E012", f"zero_optimization.stage must be 0, 1, 2 or 3, got {stage}", '"stage": 3')
        )
        stage = None
    if stage is not None:
        # All ranks take part, as in DeepSpeed: what a recipe says of data-parallel degrees does not stay.
        reader.into.plan |= (
            {"dp_replicate": None, "dp_shard": 1} if stage == 0 else {"dp_replicate": 1, "dp_shard": None}
        )
        zero.plan("stage", "zero", stage, "copies on every rank" if stage == 0 else "")
    _offload(zero, stage)
    _groups(zero, stage, num_ranks)
    for key, why in NO_EFFECT.items():
        zero.no_effect(key, why)
    for key in QUANTIZED:
        if zero.flag(key):
            zero.reject(key, f'"{key}": false; or "stage": 0 with --plan.compress int8, which is for replicas')
    if zero.has("zeropp_loco_param"):
        zero.reject("zeropp_loco_param", 'remove it; or "stage": 0 with --plan.compress int8, which is for replicas')
    if zero.has("zenflow"):
        zero.reject("zenflow", 'remove it; "offload_optimizer": {"device": "cpu"} is the nearest')
    zero.finish()


def _offload(zero: Reader, stage: int | None) -> None:
    """Optimizer state in host memory or in files, or parameters in host memory."""
    words = {name: _place(zero, f"offload_{name}") for name in ("optimizer", "param")}
    for key, name in (("cpu_offload", "optimizer"), ("cpu_offload_param", "param")):
        if zero.flag(key):
            zero.same(key, f"as offload_{name}.device cpu")
            words[name] = words[name] or WORDS[name]
    zero.no_effect("cpu_offload_use_pin_memory", "always pinned")
    word = words["param"] or words["optimizer"]
    if word is None:
        return
    if stage == 0:
        what = "offload needs ZeRO, and zero_optimization.stage is 0"
        zero.into.problems.append(Problem("E006", what, '"stage": 1; or remove offload_optimizer and offload_param'))
    elif words["param"] and ":" in (words["optimizer"] or ""):
        fix = '"device": "cpu" for offload_optimizer; or no offload_param'
        zero.into.problems.append(
            Problem("E008", "offload_param beside offload_optimizer.device 'nvme' has no counterpart in shoal", fix)
        )
    else:
        zero.into.plan["offload"] = word


def _place(zero: Reader, key: str) -> str | None:
    """The word of a plan for a section of offload; None: nothing is offloaded."""
    section = zero.section(key)
    if section is None:
        return None
    name = key.removeprefix("offload_")
    word, device = None, section.word("device", ("none", "cpu", "nvme"))
    if device == "nvme":
        word = _files(section, name)
    elif device == "cpu":
        word = WORDS[name]
        section.plan("device", "offload", word)
    elif device == "none":
        section.same("device", "nothing is offloaded")
    for other in ("pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "nvme_path"):
        if section.name(other) not in {line.key for line in zero.into.lines}:
            section.no_effect(other, "shoal sizes its own buffers in host memory")
    for other in ("pipeline_read", "pipeline_write", "fast_init", "cpuadam_cores_perc"):
        section.no_effect(other, "an internal of DeepSpeed")
    ratio = section.number("ratio")
    if ratio is not None and ratio != 1.0:
        section.reject("ratio", '"ratio": 1.0', "all of the state is offloaded, or none")
    if section.flag("super_offload"):
        section.reject("super_offload", '"super_offload": false')
    section.finish()
    return word


def _files(section: Reader, name: str) -> str | None:
    """`offload=optimizer:FOLDER`. Parameters stay in memory."""
    folder = section.word("nvme_path")
    if name == "param":
        section.reject("device", '"device": "cpu"', "parameters are offloaded to host memory")
        return None
    if folder is None or not folder or any(map(str.isspace, folder)):
        what = f"{section.name('nvme_path')} must be a folder without spaces, got {folder!r}"
        section.into.problems.append(Problem("E005", what, '"nvme_path": "/local_nvme"'))
        return None
    section.plan("device", "offload", f"optimizer:{folder}")
    section.same("nvme_path", "the folder of the state")
    return f"optimizer:{folder}"


def _groups(zero: Reader, stage: int | None, num_ranks: int | None) -> None:
    """Shards inside of groups of ranks: MiCS is `dp_replicate x dp_shard`, hpZ has no counterpart."""
    size = zero.whole("mics_shard_size", least=-1)
    if size is not None and size > 0 and stage == 3:
        if num_ranks is not None and num_ranks % size:
            what = f"zero_optimization.mics_shard_size {size} does not divide {num_ranks} ranks"
            zero.into.problems.append(Problem("E006", what, f'"mics_shard_size": {num_ranks}, or --nproc {2 * size}'))
        zero.into.plan["dp_replicate"] = None if num_ranks is None else max(1, num_ranks // size)
        zero.plan("mics_shard_size", "dp_shard", size, "replicas of groups of ranks: dp_replicate x dp_shard")
    elif size is not None:
        zero.same("mics_shard_size", "all ranks share one set of shards")
    partition = zero.whole("zero_hpz_partition_size", least=0)
    if partition is not None and partition > 1:
        nearest_thing = f"--plan.dp_shard {partition} --plan.dp_replicate N: shards and replicas, without a second copy"
        zero.reject("zero_hpz_partition_size", f"remove it; nearest is {nearest_thing}")
    elif partition is not None:
        zero.same("zero_hpz_partition_size", "all ranks share one set of shards")
