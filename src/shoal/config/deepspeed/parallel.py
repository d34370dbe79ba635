"""Tensor, sequence and pipeline parallelism of a config."""

from __future__ import annotations

from shoal.config.deepspeed.translation import Reader

SPLITS = "splits come from the model's own description"


def translate_parallel(reader: Reader) -> int:
    """The degrees other than data parallelism; returns how many ranks see the same samples."""
    tensor, sequence = _tensor(reader), reader.whole("sequence_parallel_size")
    is_engine = reader.into.target == "initialize"
    if sequence is not None and sequence > 1 and is_engine:
        fix = "shoal.Run('cp=2 ulysses') with run.batches, which gives each rank its tokens"
        reader.reject("sequence_parallel_size", fix, "the script divides the tokens there")
    elif sequence is not None:
        reader.plan("sequence_parallel_size", "cp", sequence)
        reader.into.plan |= {"context": "ulysses"} if sequence > 1 else {}
    reader.no_effect("data_parallel_size", "all other ranks are data-parallel")
    return tensor * (sequence or 1) * _pipeline(reader)


def _tensor(reader: Reader) -> int:
    section = reader.section("tensor_parallel")
    if section is None:
        return 1
    size = section.whole("autotp_size", least=0)
    if size is not None:
        section.plan("autotp_size", "tp", max(1, size))
    for key in ("dtype", "tp_overlap_comm", "preset_model", "partition_config", "injection_policy_tuple", "tp"):
        section.no_effect(key, SPLITS)
    for key in ("tensor_parallel", "keep_module_on_host", "replace_with_kernel_inject", "kernel_inject"):
        section.no_effect(key, SPLITS)
    section.finish()
    return max(1, size or 1)


def _pipeline(reader: Reader) -> int:
    if reader.values.get("pipeline") is False:
        reader.no_effect("pipeline", "no stages")
        return 1
    section = reader.section("pipeline")
    if section is None:
        return 1
    stages = section.whole("stages") or 1
    if stages > 1 and reader.into.target == "initialize":
        section.reject("stages", f"shoal.Run('pp={stages} mb=1') with run.step(batch)", "the schedule calls the model")
    elif "stages" in section.values and section.values["stages"] != "auto":
        section.plan("stages", "pp", stages)
    for key in ("partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned"):
        section.no_effect(key, "stages are cut by cost; --plan.recompute decides on recomputation")
    section.no_effect("use_reentrant", "an internal of DeepSpeed")
    section.finish()
    return stages
