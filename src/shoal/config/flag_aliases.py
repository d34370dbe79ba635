"""Command-line options of other systems, and the options of `shoal train` that replace them.

The systems are torchrun, accelerate, DeepSpeed, Lightning, the Hugging Face Trainer, Megatron-LM and torchtitan. Braces
hold an example: a typed number replaces it, and where it begins with `=`, any word. The text after `#` is a remark.
"""

from __future__ import annotations

import re

_INSTEAD = {
    "--plan zero=3  # FSDP2; zero=1 and zero=2 share less": (
        "fsdp use_fsdp fsdp_config fsdp_sharding_strategy fully_shard use_torch_fsdp2 strategy sharding_strategy"
    ),
    "--deepspeed {=ds_config.json}": "deepspeed use_deepspeed deepspeed_config",
    "--comm.wrap_classes LlamaDecoderLayer  # or comm.wrap_min_params; neither: the blocks of the model": (
        "auto_wrap_policy fsdp_auto_wrap_policy wrap_policy"
    ),
    "--comm.wrap_classes {=LlamaDecoderLayer}": (
        "transformer_layer_cls_to_wrap fsdp_transformer_layer_cls_to_wrap transformer_cls_names_to_wrap"
    ),
    "--comm.wrap_min_params {100000000}": "min_num_params fsdp_min_num_params",
    "--comm.forward_prefetch {1}  # units that are gathered ahead": "forward_prefetch fsdp_forward_prefetch",
    "--comm.backward_prefetch {1}  # units that are gathered ahead; one, unless set": (
        "backward_prefetch fsdp_backward_prefetch fsdp_backward_prefetch_policy"
    ),
    "--plan zero=3  # FSDP2 frees memory without stopping the host, so no setting limits gathers": "limit_all_gathers",
    "--plan zero=3  # the next unit is gathered while one computes; comm.forward_prefetch gathers more": (
        "overlap_param_gather"
    ),
    "--plan zero=2  # keeps parameters gathered until the backward; zero=3 does not": (
        "reshard_after_forward fsdp_reshard_after_forward"
    ),
    "--plan 'zero=3 bf16'  # units are gathered in bfloat16, and gradients are reduced in float32": (
        "mp_policy fsdp_mixed_precision grad_reduce_in_fp32 accumulate_allreduce_grads_in_fp32"
    ),
    "--comm.reduce_dtype bf16  # or fp32, the default": "reduce_dtype mixed_precision_reduce",
    "--plan zero=3  # every rank starts with the same weights anyway": (
        "sync_module_states fsdp_sync_module_states use_orig_params fsdp_use_orig_params "
        "cpu_ram_efficient_loading fsdp_cpu_ram_efficient_loading"
    ),
    "--plan.zero {3}": "zero_stage zero",
    "--plan zero=0  # copies on all ranks, which is DDP, and the default": "ddp multi_gpu",
    "--plan zero=1": "use_distributed_optimizer",
    "--plan.offload optimizer": "offload_optimizer_device cpu_offload",
    "--plan.offload parameters": "offload_param_device offload_params fsdp_offload_params",
    "--plan.dp_shard {8}": "data_parallel_shard_degree",
    "--plan.dp_replicate {2}": "data_parallel_replicate_degree",
    "--plan.tp {2}": "tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size tp_size tp",
    "--plan.pp {2}": "pipeline_model_parallel_size pipeline_parallel_degree pp_size pp",
    "--plan.schedule 1f1b": "pipeline_parallel_schedule",
    "--plan 'pp=2 interleaved v=2'": "num_layers_per_virtual_pipeline_stage",
    "--plan.cp {2}": "context_parallel_size context_parallel_degree cp",
    "--plan.ep {2}": "expert_model_parallel_size expert_parallel_degree ep",
    "--plan 'tp=2 sp=on'": "sequence_parallel",
    "--nproc {4}": "nproc_per_node num_processes num_gpus gpus devices",
    "--nproc 4": "standalone local_rank",
    "torchrun --nnodes {2} --nproc-per-node 8 -m shoal train recipe.yaml": "nnodes num_nodes num_machines",
    "torchrun --nnodes 2 --nproc-per-node 8 -m shoal train recipe.yaml": (
        "node_rank machine_rank rdzv_endpoint rdzv_backend master_addr master_port main_process_ip hostfile"
    ),
    "--model.lora.rank {8}": "lora lora_r lora_rank use_lora use_peft peft",
    "--model.lora.base nf4 --model.lora.rank 8": "load_in_4bit qlora use_qlora",
    "--device cuda  # or cpu, or auto": "accelerator",
    "--device cpu": "use_cpu no_cuda cpu",
    "--device cuda": "cuda gpu",
    "--launch.max_restarts {3}": "max_restarts",
    "--plan.precision fp16": "fp16 half",
    "--plan.precision bf16": "bf16",
    "--plan.precision fp8": "fp8",
    "--plan.precision bf16  # or fp32, fp16, fp8": "mixed_precision precision dtype torch_dtype amp",
    "--plan.recompute full  # or selective": (
        "gradient_checkpointing activation_checkpointing activation_checkpoint recompute_activations "
        "recompute_granularity fsdp_activation_checkpointing"
    ),
    "--run.compile true": "compile torch_compile",
    "--run.attention auto": "attn_implementation use_flash_attn",
    "--plan.mb 4  # samples of a microbatch: data.global_batch / ranks / mb of them are accumulated": (
        "gradient_accumulation_steps accumulate_grad_batches"
    ),
    "--plan.mb {4}": (
        "per_device_train_batch_size per_device_batch_size micro_batch_size train_micro_batch_size_per_gpu "
        "local_batch_size"
    ),
    "--data.global_batch {32}": "train_batch_size global_batch_size batch_size batch",
    "--data.seq_len {256}": "seq_len seq_length max_length max_seq_length block_size",
    "--optim.lr {3e-4}": "learning_rate lr",
    "--optim.weight_decay {0.1}": "weight_decay",
    "--optim.clip {1.0}": "max_grad_norm gradient_clip_val clip_grad",
    "--optim.schedule cosine  # or linear, constant": "lr_scheduler_type lr_decay_style",
    "--optim.warmup {100}step": "warmup_steps lr_warmup_iters",
    "--optim.name adamw  # or sgd, lion, muon, adafactor, lamb, lars": "optimizer",
    "--optim.betas 0.9 0.95": "adam_beta1",
    "--optim.eps {1e-8}": "adam_epsilon",
    "--run.duration {2}epoch": "epochs num_train_epochs max_epochs num_epochs",
    "--run.duration {100}step": "max_steps steps train_iters max_iters training_steps max_duration",
    "--run.dir {=runs/mine}": "output_dir default_root_dir out_dir dump_folder",
    "--checkpoint.dir {=saved}": "save save_dir checkpoint_dir",
    "--checkpoint.every {100}step": "save_steps save_interval save_every checkpointing_steps",
    "--checkpoint.keep {2}": "save_total_limit",
    "--resume latest  # or a step, or fresh; an unfinished run is resumed anyway": (
        "resume_from_checkpoint resume_from load ckpt_path"
    ),
    "--run.start_from {=model.safetensors}": "init_from pretrained load_from",
    "--run.trackers wandb": "wandb use_wandb wandb_project with_tracking enable_wandb",
    "--run.trackers tensorboard": "tensorboard tensorboard_dir",
    "--run.trackers mlflow": "mlflow",
    "--run.trackers {=wandb}  # wandb, tensorboard, mlflow": "report_to logger log_with",
    "--run.log_every {10}": "logging_steps log_interval log_every_n_steps",
    "--run.evaluate_every {100}step": "eval_steps eval_interval",
    "--run.seed {0}": "seed",
    "--run.deterministic true": "deterministic full_determinism",
    "--data.source {=python}": "dataset dataset_name data_path train_file",
    "--data.tokenizer {=bytes}": "tokenizer tokenizer_name",
    "--model.preset llama3-8b": "model_name model_name_or_path",
    "shoal train recipe.yaml  # without an option": "config config_file",
}
"""Option of `shoal train` → options of other systems, with underscores."""

FLAGS = {name: typed for typed, names in _INSTEAD.items() for name in names.split()}


def instead_of(name: str, typed: str = "") -> str | None:
    """The replacement of another system's option, with its value where it fits; None: the option is unknown.

    >>> instead_of("lr", "1e-3"), instead_of("--nproc-per-node"), instead_of("max-steps", "50")
    ('--optim.lr 1e-3', '--nproc 4', '--run.duration 50step')
    """
    found = FLAGS.get(name.removeprefix("--").replace("-", "_").lower().rpartition(".")[2])
    return None if found is None else re.sub(r"\{(=?)([^}]*)\}", lambda match: _value(match, typed), found)


def _value(match: re.Match[str], typed: str) -> str:
    takes_any, example = match[1], match[2]
    fits = re.fullmatch(r"[\w./:+-]+", typed) if takes_any else re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", typed)
    return typed if fits else example
