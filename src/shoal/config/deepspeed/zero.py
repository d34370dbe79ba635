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
            "save_muon_momentum_buffer_in_memory",
        ),
        "an internal of DeepSpeed",
    ),
    **dict.fromkeys(("mics_hierarchical_params_gather",), "the collectives of torch choose their algorithm"),
}
QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
LEGACY = ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory")


def translate_zero(reader: Reader, num_ranks: int | None) -> None:
    """The stage becomes `zero=`, over all data-parallel ranks as in DeepSpeed."""
    if not reader.has("zero_optimization"):
        return
    zero = reader.section("zero_optimization")
    assert zero is not None
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
    """Optimizer state, or parameters, in host memory."""
    has_offload = {name: _device(zero, f"offload_{name}") == "cpu" for name in ("optimizer", "param")}
    for key, name in (("cpu_offload", "optimizer"), ("cpu_offload_param", "param")):
        has_offload[name] |= bool(zero.flag(key))
        if zero.values.get(key):
            zero.same(key, f"as offload_{name}.device cpu")
    zero.no_effect("cpu_offload_use_pin_memory", "always pinned")
    if not any(has_offload.values()):
        return
    if stage is not None and stage == 0:
        what = "offload needs ZeRO, and zero_optimization.stage is 0"
        zero.into.problems.append(Problem("E006", what, '"stage": 1; or remove offload_optimizer and offload_param'))
        return
    zero.into.plan["offload"] = "parameters" if has_offload["param"] else "optimizer"


def _device(zero: Reader, key: str) -> str | None:
    section = zero.section(key)
    if section is None:
        return None
    device = section.word("device", ("none", "cpu", "nvme"))
    if device == "nvme":
        section.reject("device", '"device": "cpu"; shoal offloads to host memory')
    elif device == "cpu":
        word = "parameters" if key == "offload_param" else "optimizer"
        section.plan("device", "offload", word)
    elif device == "none":
        section.same("device", "nothing is offloaded")
    for name in ("pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "nvme_path"):
        section.no_effect(name, "shoal sizes its own buffers in host memory")
    for name in ("pipeline_read", "pipeline_write", "fast_init", "cpuadam_cores_perc"):
        section.no_effect(name, "an internal of DeepSpeed")
    ratio = section.number("ratio")
    if ratio is not None and ratio != 1.0:
        section.reject("ratio", '"ratio": 1.0', "all of the state is offloaded, or none")
    if section.flag("super_offload"):
        section.reject("super_offload", '"super_offload": false')
    section.finish()
    return device


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
