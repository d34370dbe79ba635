"""The arguments of Megatron-LM that a plan knows, those without effect on one, and those without a counterpart."""

from __future__ import annotations

from typing import Any

WHOLE = {
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "micro-batch-size": "mb",
    "num-virtual-stages-per-pipeline-rank": "v",
    "num-distributed-optimizer-instances": "dp_replicate",
}
"""Arguments that are a number in a plan."""

SWITCHES: dict[str, tuple[str, Any]] = {
    "bf16": ("precision", "bf16"),
    "fp16": ("precision", "fp16"),
    "sequence-parallel": ("sp", True),
    "use-distributed-optimizer": ("zero", 1),
    "use-torch-fsdp2": ("zero", 3),
    "recompute-activations": ("recompute", "selective"),
    "optimizer-cpu-offload": ("offload", "optimizer"),
}
"""Arguments without a value that are a word of a plan."""

WORDS: dict[str, dict[str, tuple[str, Any]]] = {
    "recompute-granularity": {"full": ("recompute", "full"), "selective": ("recompute", "selective")},
    "cp-comm-type": {"p2p": ("context", "ring"), "a2a": ("context", "ulysses")},
    "fp8-format": dict.fromkeys(("e4m3", "hybrid"), ("precision", "fp8")),
}
"""Arguments with a word → the word of a plan for each."""

STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""What Megatron-FSDP shards → the stage. Without an argument it shards all, the last of these."""
OWN_FSDP = ("use-megatron-fsdp", "use-custom-fsdp")
"""Megatron-FSDP, and its name before."""

STRENGTH: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "fp16", "bf16", "fp8"),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
}
"""Words of a plan that several arguments set: the last value here holds, in whatever order the arguments stand."""

REQUEST = {
    "global-batch-size": "global_batch",
    "seq-length": "seq_len",
    "hidden-size": "hidden",
    "num-layers": "layers",
    "num-attention-heads": "heads",
    "num-query-groups": "kv_heads",
    "ffn-hidden-size": "ffn",
    "vocab-size": "vocabulary",
    "padded-vocab-size": "vocabulary",
    "num-experts": "experts",
    "moe-router-topk": "top_k",
    "moe-ffn-hidden-size": "expert_ffn",
}
"""Arguments that are an option of `shoal plan`."""

REJECTED = {
    "rampup-batch-size": "leave it out: a plan has one global batch",
    "step-batch-size-schedule": "leave it out: a plan has one global batch",
    "hierarchical-context-parallel-sizes": "--cp-comm-type p2p, or a2a",
    "pipeline-model-parallel-layout": "leave it out: stages are cut by cost",
    "decoder-first-pipeline-num-layers": "leave it out: stages are cut by cost",
    "decoder-last-pipeline-num-layers": "leave it out: stages are cut by cost",
    "account-for-embedding-in-pipeline-split": "leave it out: stages are cut by cost",
    "account-for-loss-in-pipeline-split": "leave it out: stages are cut by cost",
    "fp4-format": "--fp8-format hybrid",
    "cpu-offloading-num-layers": "--optimizer-cpu-offload, or --recompute-granularity full",
    "distribute-saved-activations": "leave it out",
    "use-tp-pp-dp-mapping": "leave it out: the ranks of a node are tp first",
    "hybrid-layer-pattern": "leave it out: the planner knows transformers",
    "hybrid-override-pattern": "leave it out: the planner knows transformers",
    "multi-latent-attention": "--group-query-attention with --num-query-groups: the planner knows heads of one size",
    "window-size": "leave it out: the planner counts attention over whole sequences",
    "recompute-modules": "leave it out: selective recomputes what shoal chooses",
    "optimizer-offload-fraction": "leave it out: all of the state is offloaded, or none",
    "main-params-dtype": "leave it out; shoal plan --param-dtype bf16 is the nearest",
    "exp-avg-dtype": "leave it out; shoal plan --state-dtype bf16 is the nearest",
    "exp-avg-sq-dtype": "leave it out; shoal plan --state-dtype bf16 is the nearest",
    "first-last-layers-bf16": "leave it out: fp8 holds for all layers",
}
"""Arguments without a counterpart → the nearest thing."""

_SPEED = """
    use-mcore-models transformer-impl overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step
    tp-comm-overlap no-async-tensor-model-parallel-allreduce gradient-accumulation-fusion
    no-gradient-accumulation-fusion
    use-flash-attn attention-backend no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion
    no-bias-dropout-fusion no-rope-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl ddp-bucket-size
    ddp-num-buckets ddp-average-in-collective no-check-for-nan-in-loss-and-grad delay-grad-reduce align-grad-reduce
    align-param-gather deallocate-pipeline-outputs defer-embedding-wgrad-compute manual-gc manual-gc-interval
    enable-cuda-graph cuda-graph-impl distributed-backend distributed-timeout-minutes nccl-communicator-config-path
    moe-grouped-gemm moe-permute-fusion moe-token-dispatcher-type use-precision-aware-optimizer
    moe-shared-expert-overlap fp8-recipe fp8-margin fp8-amax-history-len fp8-amax-compute-algo fp8-param-gather
    no-overlap-p2p-communication overlap-p2p-communication-warmup-flush high-priority-stream-groups sharp-enabled-group
    use-nccl-ub tp-comm-overlap-cfg no-persist-layer-norm overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads
    no-pin-cpu-params grad-reduce-in-bf16 accumulate-allreduce-grads-in-fp32 use-torch-optimizer-for-cpu-offload
    torch-fsdp2-no-reshard-after-forward local-rank lazy-mpu-init use-cpu-initialization empty-unused-memory-level
"""
_TRAINING = """
    train-iters train-samples lr min-lr lr-decay-style lr-decay-iters lr-decay-samples lr-warmup-iters lr-warmup-samples
    lr-warmup-fraction lr-warmup-init lr-wsd-decay-style lr-wsd-decay-iters weight-decay start-weight-decay
    end-weight-decay weight-decay-incr-style clip-grad adam-beta1 adam-beta2 adam-eps sgd-momentum seed
    calculate-per-token-loss no-weight-decay-cond-type check-for-large-grads init-method-xavier-uniform
    init-method-std loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis dataloader-type
    override-opt_param-scheduler use-checkpoint-opt_param-scheduler exit-interval exit-duration-in-mins
    exit-signal-handler attention-dropout hidden-dropout decoupled-lr decoupled-min-lr
"""
_MODEL = """
    rotary-base rotary-percent no-position-embedding normalization norm-epsilon add-qkv-bias qk-layernorm
    apply-layernorm-1p attention-softmax-in-fp32 no-query-key-layer-scaling rotary-scaling-factor use-rope-scaling
    moe-router-load-balancing-type moe-aux-loss-coeff moe-z-loss-coeff moe-router-pre-softmax
    moe-expert-capacity-factor moe-pad-expert-input-to-capacity
    moe-router-score-function moe-router-enable-expert-bias moe-router-dtype mtp-loss-scaling-factor
"""
_FILES = """
    data-path split train-data-path valid-data-path test-data-path data-cache-path mock-data num-workers vocab-file
    merge-file tokenizer-type tokenizer-model reset-position-ids reset-attention-mask eod-mask-loss save load
    save-interval ckpt-format async-save no-save-optim no-save-rng no-load-optim no-load-rng finetune
    use-dist-ckpt auto-detect-ckpt-format pretrained-checkpoint eval-interval eval-iters log-interval
    log-throughput log-params-norm log-num-zeros-in-grad log-memory-to-tensorboard log-timers-to-tensorboard
    log-validation-ppl-to-tensorboard tensorboard-dir tensorboard-queue-size tensorboard-log-interval wandb-project
    wandb-exp-name wandb-save-dir timing-log-level profile profile-step-start profile-step-end profile-ranks
    use-pytorch-profiler log-progress one-logger-project no-one-logger
    ckpt-fully-parallel-save dist-ckpt-format num-dataset-builder-threads no-mmap-bin-files
    no-create-attention-mask-in-dataloader
"""
NO_EFFECT = {
    **dict.fromkeys(_SPEED.split(), "shoal has its own kernels and buckets"),
    **dict.fromkeys(_TRAINING.split(), "a setting of a recipe, not of a plan"),
    **dict.fromkeys(_MODEL.split(), "the size of the model decides"),
    "optimizer": "a setting of a recipe; memory is predicted with the states of AdamW",
    "mtp-num-layers": "predicted without its layers, which predict further tokens",
    **dict.fromkeys(_FILES.split(), "a setting of a recipe, not of a plan"),
}
"""Arguments without effect on a plan → why."""
