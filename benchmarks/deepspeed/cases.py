"""The cases of the comparison: ZeRO 0 to 3, fp32 and bf16, accumulation, clipping, schedules."""

from __future__ import annotations

from typing import Any

STEPS = 20
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.05, "torch_adam": True}}
ADAM = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.0, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 8}}
LINEAR = {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 8, "warmup_type": "linear"}}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 5, "total_num_steps": 20, "warmup_min_lr": 1e-3},
}
COSINE = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5, "total_num_steps": 20}}
SGD = {"type": "SGD", "params": {"lr": 5e-2, "momentum": 0.9, "weight_decay": 0.05}}
L2 = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.05, "adam_w_mode": False, "torch_adam": True}}


def case(name: str, precision: str = "fp32", *, stage: int, accumulated: int = 1, **config: Any) -> dict[str, Any]:
    """One case. Under bf16 gradients are summed in float32 over microbatches and ranks, as shoal does; at stage 0
    DeepSpeed cannot, and shoal rounds them there."""
    whole = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulated,
        "zero_optimization": {"stage": stage},
        "optimizer": ADAMW,
        **({"bf16": {"enabled": True}, "communication_data_type": "fp32"} if precision == "bf16" else {}),
        **({"data_types": {"grad_accum_dtype": "fp32"}} if precision == "bf16" and stage else {}),
        **config,
    }
    return {"name": name, "precision": precision, "steps": STEPS, "config": whole}


def cases() -> list[dict[str, Any]]:
    found = []
    for stage in range(4):
        found += [
            case(f"ZeRO {stage}, fp32", stage=stage),
            case(f"ZeRO {stage}, fp32, 3 microbatches, clip 0.1", stage=stage, accumulated=3, gradient_clipping=0.1),
            case(f"ZeRO {stage}, bf16", "bf16", stage=stage),
            case(
                f"ZeRO {stage}, bf16, 2 microbatches, clip 0.1", "bf16", stage=stage, accumulated=2,
                gradient_clipping=0.1,
            ),
        ]  # fmt: skip
    found += [
        case("ZeRO 1, WarmupLR (log)", stage=1, scheduler=WARMUP),
        case("ZeRO 2, WarmupLR (linear)", stage=2, scheduler=LINEAR),
        case("ZeRO 3, WarmupDecayLR", stage=3, scheduler=DECAY, accumulated=2),
        case("ZeRO 0, WarmupCosineLR", stage=0, scheduler=COSINE),
        case("ZeRO 0, bf16, 3 microbatches, WarmupLR", "bf16", stage=0, accumulated=3, scheduler=WARMUP),
        case("ZeRO 2, Adam", stage=2, optimizer=ADAM),
        case("ZeRO 1, Adam with L2", stage=1, optimizer=L2),
        case("ZeRO 0, bf16, Adam with L2", "bf16", stage=0, optimizer=L2),
        case("ZeRO 2, SGD", stage=2, optimizer=SGD, zero_allow_untested_optimizer=True),
        case("ZeRO 0, bf16, SGD", "bf16", stage=0, accumulated=2, optimizer=SGD),
    ]
    return found
