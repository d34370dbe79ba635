"""Names of other systems or of other sections of a recipe, and the names to use here."""

from __future__ import annotations

OTHER_SYSTEMS = {
    "states": "optim.state_dtype",
    "weights": "optim.param_dtype",
    "patience": "launch.grace_period",
    "remake_gates": "run.recompute_swiglu",
    "fp8_narrow": "run.fp8_min_features",
    "find_unused": "run.find_unused_parameters",
    "learnrate": "optim.lr",
    "learning_rate": "optim.lr",
    "max_grad_norm": "optim.clip",
    "gradient_clip_val": "optim.clip",
    "lr_scheduler_type": "optim.schedule",
    "warmup_steps": "optim.warmup",
    "train_batch_size": "data.global_batch",
    "global_batch_size": "data.global_batch",
    "batch_size": "data.global_batch",
    "per_device_train_batch_size": "plan.mb",
    "per_device_batch_size": "plan.mb",
    "micro_batch_size": "plan.mb",
    "gradient_accumulation_steps": "plan.mb (data.global_batch / ranks / mb microbatches are accumulated)",
    "mixed_precision": "plan.precision",
    "dtype": "plan.precision",
    "gradient_checkpointing": "plan.recompute",
    "activation_checkpointing": "plan.recompute",
    "fused": "optim.implementation",
    "bf16": "plan.precision bf16",
    "fp16": "plan.precision fp16",
    "resume_from_checkpoint": "--resume latest, or --resume STEP",
    "init_from": "run.start_from",
    "pretrained": "run.start_from",
    "load_from": "run.start_from",
    "save_total_limit": "checkpoint.keep",
    "save_dir": "checkpoint.dir",
    "checkpoint_dir": "checkpoint.dir",
    "max_restarts": "launch.max_restarts",
    "max_steps": "run.duration",
    "max_duration": "run.duration",
    "steps": "run.duration",
    "output_dir": "run.dir",
    "report_to": "run.trackers",
    "logging_steps": "run.log_every",
    "full_determinism": "run.deterministic",
    "num_processes": "launch.nproc",
    "seq_len": "data.seq_len",
    "max_length": "data.seq_len",
    "tensor_parallel_degree": "plan.tp",
    "pipeline_parallel_degree": "plan.pp",
    "context_parallel_degree": "plan.cp",
    "data_parallel_shard_degree": "plan.dp_shard",
    "data_parallel_replicate_degree": "plan.dp_replicate",
}
"""Keys of other systems' settings → keys of a recipe.

Those whose value needs a unit, such as epochs, are in `config/flag_aliases.py` alone, which keeps a typed value.
"""

OTHER_SECTIONS = {
    "compile": "--run.compile true",
    "weights": "--optim.param_dtype bf16",
    "states": "--optim.state_dtype bf16",
    "loss": "--run.loss fused",
    "fused": "--run.loss fused",
    "attention": "--run.attention auto",
    "cudnn": "--run.attention cudnn",
    "flash": "--run.attention flash",
    "rowwise": "--run.fp8 rowwise",
    "recompute_swiglu": "--run.recompute_swiglu false",
    "batch": "--data.global_batch 32",
    "sequence": "--data.seq_len 256",
    "nproc": "--launch.nproc 2",
}
"""Keys that belong to another section of a recipe, not to the plan → the setting to type."""

OTHER_NAMES = {
    **{"float8": "fp8", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"},
    **{"float64": "fp64", "double": "fp64", "selective": "recompute=selective", "full": "recompute=full"},
}
"""Names that torch and others use → the word of a plan."""
