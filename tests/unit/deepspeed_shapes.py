"""Forty shapes of `ds_config.json` as people have them: each is translated, or rejected by the code of its rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Shape:
    name: str
    config: dict[str, Any]
    plan: str = "auto"
    """The words that it becomes."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Some of the settings that it becomes."""
    codes: tuple[str, ...] = ()
    """Codes of its problems; empty: it is translated."""
    ranks: int | None = 8


def adamw(**params: Any) -> dict[str, Any]:
    return {"type": "AdamW", "params": {"lr": 3e-4, **params}}


def linear(kind: str = "WarmupLR", **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": {"warmup_type": "linear", "warmup_num_steps": 100, **params}}


TRAINER = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
"""As the Trainer of transformers fills it in."""
BUCKETS = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
STAGE_3 = {
    "stage": 3,
    **BUCKETS,
    "sub_group_size": 1e9,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
CPU = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4}
BATCH = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}


SHAPES = [
    # ---- translated -------------------------------------------------------------------------------------------------
    Shape("smallest", {"train_batch_size": 16}, "mb=2", {"data.global_batch": 16}),
    Shape("batch of each GPU", {"train_micro_batch_size_per_gpu": 4}, "mb=4", {"data.global_batch": 32}),
    Shape("accumulated", {"train_batch_size": 64, "gradient_accumulation_steps": 4}, "mb=2", {"data.global_batch": 64}),
    Shape("plain DDP in fp16", {**BATCH, "fp16": {"enabled": True}}, "mb=4 fp16"),
    Shape("DDP spelled out", {**BATCH, "zero_optimization": {"stage": 0}}, "dp_shard=1 zero=0 mb=4"),
    Shape(
        "ZeRO 1",
        {**BATCH, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
        "dp_replicate=1 zero=1 mb=4 bf16",
    ),
    Shape("ZeRO 2 with buckets", {**BATCH, "zero_optimization": {"stage": 2, **BUCKETS}}, "dp_replicate=1 zero=2 mb=4"),
    Shape("ZeRO 3", {**BATCH, "zero_optimization": STAGE_3}, "dp_replicate=1 zero=3 mb=4"),
    Shape("Trainer, ZeRO 2", {**TRAINER, "zero_optimization": {"stage": 2, **BUCKETS}}, "dp_replicate=1 zero=2"),
    Shape(
        "Trainer, ZeRO 3", {**TRAINER, "zero_optimization": STAGE_3}, "dp_replicate=1 zero=3", {"run.log_every": 2000}
    ),
    Shape(
        "Trainer, ZeRO 2 offload",
        {**TRAINER, "zero_optimization": {"stage": 2, "offload_optimizer": CPU, **BUCKETS}},
        "dp_replicate=1 zero=2 offload=optimizer",
    ),
    Shape(
        "Trainer, ZeRO 3 offload of both",
        {**TRAINER, "zero_optimization": {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU}},
        "dp_replicate=1 zero=3 offload=parameters",
    ),
    Shape(
        "ZeRO 3 offload of the optimizer",
        {**BATCH, "bf16": {"enabled": True}, "zero_optimization": {**STAGE_3, "offload_optimizer": CPU}},
        "dp_replicate=1 zero=3 mb=4 bf16 offload=optimizer",
    ),
    Shape(
        "offload as in 2020",
        {**BATCH, "zero_optimization": {"stage": 2, "cpu_offload": True}, "zero_allow_untested_optimizer": True},
        "dp_replicate=1 zero=2 mb=4 offload=optimizer",
    ),
    Shape(
        "BERT of 2020",
        {
            **BATCH,
            "steps_per_print": 100,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.98], "bias_correction": True}},
            "gradient_clipping": 1.0,
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 20, "loss_scale_window": 500},
            "prescale_gradients": True,
            "wall_clock_breakdown": False,
        },
        "mb=4 fp16",
        {"optim.name": "adamw", "optim.loss_scale": 2.0**20, "optim.loss_scale_window": 500, "optim.clip": 1.0},
    ),
    Shape(
        "GPT with linear warm-up",
        {**BATCH, "optimizer": adamw(weight_decay=0.1), "scheduler": linear(warmup_max_lr=6e-4)},
        "mb=4",
        {"optim.lr": 6e-4, "optim.warmup": "100step", "optim.schedule": "constant", "optim.weight_decay": 0.1},
    ),
    Shape(
        "linear decay",
        {**BATCH, "optimizer": adamw(), "scheduler": linear("WarmupDecayLR", total_num_steps=9000)},
        "mb=4",
        {"optim.schedule": "linear", "optim.final_lr": 0.0, "run.duration": "9000step", "optim.lr": 1e-3},
    ),
    Shape(
        "cosine",
        {**BATCH, "optimizer": adamw(), "scheduler": linear("WarmupCosineLR", total_num_steps=9000, cos_min_ratio=0.1)},
        "mb=4",
        {"optim.schedule": "cosine", "optim.final_lr": 0.1, "optim.lr": 3e-4},
    ),
    Shape("Lion", {**BATCH, "optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}, "mb=4", {"optim.name": "lion"}),
    Shape(
        "SGD",
        {**BATCH, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
        "mb=4",
        {"optim.momentum": 0.9},
    ),
    Shape("autocast", {**BATCH, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "mb=4 bf16"),
    Shape("bfloat16 by its old name", {**BATCH, "bfloat16": {"enabled": True}}, "mb=4 bf16"),
    Shape("no clipping", {**BATCH, "gradient_clipping": 0.0, "fp16": {"enabled": False}}, "mb=4", {"optim.clip": None}),
    Shape(
        "small weights and states",
        {
            **BATCH,
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            "optimizer": adamw(),
        },
        "dp_replicate=1 zero=2 mb=4 bf16",
        {"optim.param_dtype": "bf16", "optim.state_dtype": "bf16"},
    ),
    Shape(
        "MiCS",
        {**BATCH, "zero_optimization": {"stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": True}},
        "dp_replicate=2 dp_shard=4 zero=3 mb=4",
    ),
    Shape(
        "AutoTP",
        {**BATCH, "tensor_parallel": {"autotp_size": 4}, "zero_optimization": {"stage": 1}},
        "dp_replicate=1 tp=4 zero=1 mb=4",
    ),
    Shape(
        "Ulysses",
        {**BATCH, "sequence_parallel_size": 2, "zero_optimization": {"stage": 3}},
        "dp_replicate=1 cp=2 ulysses zero=3 mb=4",
    ),
    Shape("pipeline", {**BATCH, "pipeline": {"stages": 2, "partition": "best"}}, "pp=2 mb=4"),
    Shape(
        "recomputed",
        {
            **BATCH,
            "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4, "profile": False},
        },
        "mb=4 recompute=full",
    ),
    Shape(
        "watched",
        {
            **BATCH,
            "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "a"},
            "csv_monitor": {"enabled": True, "output_path": "logs"},
            "flops_profiler": {"enabled": True, "profile_step": 5},
            "comms_logger": {"enabled": True, "prof_all": True},
            "memory_breakdown": True,
        },
        "mb=4",
        {"run.trackers": ["tensorboard"]},
    ),
    Shape(
        "switched off",
        {
            **BATCH,
            "elasticity": {"enabled": False, "max_train_batch_size": 2000},
            "autotuning": {"enabled": False},
            "amp": {"enabled": False, "opt_level": "O1"},
            "aio": {"block_size": 1048576, "queue_depth": 8},
            "checkpoint": {"tag_validation": "Warn", "load_universal": True},
        },
        "mb=4 fp32",
    ),
    Shape(
        "fp16 switched off",
        {**BATCH, "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2}},
        "mb=4 fp32",
    ),
    Shape("ZeRO as in 2019", {**BATCH, "zero_optimization": True}, "dp_replicate=1 zero=1 mb=4"),
    Shape("no ZeRO as in 2019", {**BATCH, "zero_optimization": False}, "dp_shard=1 zero=0 mb=4"),
    Shape(
        "compression switched off",
        {
            **BATCH,
            "compression_training": {
                "weight_quantization": {
                    "shared_parameters": {"enabled": False, "schedule_offset": 0},
                    "different_groups": {"wq1": {"params": {"start_bits": 8}, "modules": ["*"]}},
                },
                "layer_reduction": {"enabled": False, "keep_number_layer": 5},
            },
        },
        "mb=4",
    ),
    Shape("compiled", {**BATCH, "compile": {"deepcompile": True}}, "mb=4", {"run.compile": True}),
    Shape(
        "optimizer on NVMe",
        {**BATCH, "zero_optimization": {"stage": 3, "offload_optimizer": NVME}, "aio": {"queue_depth": 8}},
        "dp_replicate=1 zero=3 mb=4 offload=optimizer:/local_nvme",
    ),
    # ---- rejected ---------------------------------------------------------------------------------------------------
    Shape(
        "ZeRO-Infinity",
        {**BATCH, "zero_optimization": {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME}},
        codes=("E008",),
    ),
    Shape(
        "ZeRO++",
        {
            **BATCH,
            "zero_optimization": {
                "stage": 3,
                "zero_quantized_weights": True,
                "zero_quantized_gradients": True,
                "zero_hpz_partition_size": 8,
            },
        },
        codes=("E008",) * 3,
    ),
    Shape(
        "1-bit Adam",
        {**BATCH, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 400}}},
        codes=("E009",),
    ),
    Shape("Lamb", {**BATCH, "optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "max_coeff": 0.3}}}, codes=("E009",)),
    Shape("Muon", {**BATCH, "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}, codes=("E009",)),
    Shape(
        "Adam with L2",
        {**BATCH, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}}},
        codes=("E008",),
    ),
    Shape(
        "logarithmic by default",
        {**BATCH, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}},
        codes=("E010",),
    ),
    Shape("one cycle", {**BATCH, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}}, codes=("E010",)),
    Shape("fixed loss scale", {**BATCH, "fp16": {"enabled": True, "loss_scale": 128}}, codes=("E008",)),
    Shape("both precisions", {**BATCH, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, codes=("E011",)),
    Shape("Apex", {**BATCH, "amp": {"enabled": True, "opt_level": "O2"}}, codes=("E008",)),
    Shape("contradicting sizes", {**BATCH, "gradient_accumulation_steps": 4}, codes=("E006",)),
    Shape("too few ranks known", {"train_micro_batch_size_per_gpu": 4}, codes=("E007",), ranks=None),
    Shape("misspelt", {**BATCH, "zero_optimisation": {"stage": 2}}, codes=("E004",)),
    Shape("elastic", {**BATCH, "elasticity": {"enabled": True, "max_train_batch_size": 2000}}, codes=("E008",)),
    Shape(
        "curriculum", {**BATCH, "curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"}}, codes=("E008",)
    ),
    Shape("words for numbers", {"train_batch_size": "64", "gradient_clipping": True}, codes=("E005", "E005")),
    Shape("steps alone", {"gradient_accumulation_steps": 4, "optimizer": adamw()}, codes=("E007",)),
    Shape(
        "compression",
        {
            **BATCH,
            "compression_training": {
                "weight_quantization": {
                    "shared_parameters": {"enabled": True},
                    "different_groups": {"wq1": {"params": {"start_bits": 8}}},
                }
            },
        },
        codes=("E008",),
    ),
    Shape(
        "offload by the compiler",
        {**BATCH, "compile": {"deepcompile": True, "offload_opt_states": True, "offload_activations": True}},
        codes=("E004", "E008"),
    ),
    Shape("sparse", {**BATCH, "sparse_gradients": True, "sparse_attention": {"mode": "fixed"}}, codes=("E008", "E008")),
]
