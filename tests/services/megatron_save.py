"""Train a small llama with Megatron Core on CPU, and save it with its own `dist_checkpointing`.

torchrun ... megatron_save.py FOLDER TP PP OPTIMIZER [bf16]

Megatron Core expects CUDA devices. `OnCpu` sends what it asks of "cuda" to the CPU; sums, layers and files are its own.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

ARGS: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2,
    "kv_channels": 8, "ffn_hidden_size": 48, "swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm",
    "norm_epsilon": 1e-6, "position_embedding_type": "rope", "rotary_base": 5000, "rotary_percent": 1.0,
    "max_position_embeddings": 64, "untie_embeddings_and_output_weights": True, "init_method_std": 0.1,
    "make_vocab_size_divisible_by": 128, "padded_vocab_size": 128, "vocab_size": 100,
}  # fmt: skip
"""What Megatron-LM saves of its arguments, under its names, as far as the model depends on them."""
STEPS = 3


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are on the CPU, and their type is one of CUDA."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


def on_cpu() -> None:
    """Replace what has no CPU form: the current device, and states of CUDA's random numbers (there is no dropout)."""
    from megatron.core import tensor_parallel

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    none = types.SimpleNamespace(fork=lambda *_: contextlib.nullcontext())
    tensor_parallel.get_cuda_rng_tracker = lambda *_, **__: none
    OnCpu().__enter__()


def build(tp: int, pp: int, dtype: torch.dtype) -> Any:
    """This rank's part of the model."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size")
    config = TransformerConfig(
        **{name: ARGS[name] for name in (*names, "init_method_std", "add_bias_linear", "normalization")},
        gated_linear_unit=True, activation_func=F.silu, layernorm_epsilon=ARGS["norm_epsilon"],
        use_cpu_initialization=True, bias_activation_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        pipeline_dtype=dtype, params_dtype=dtype, bf16=dtype is torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(parallel_state.get_pipeline_model_parallel_rank())
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=ARGS["padded_vocab_size"],
        max_sequence_length=ARGS["max_position_embeddings"], position_embedding_type="rope",
        rotary_base=ARGS["rotary_base"], share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    return model.to(dtype)


def trainer(model: Any, sharding: str, dtype: torch.dtype, tokens: torch.Tensor) -> tuple[Any, Callable[[], None]]:
    """The optimizer, and a function that makes a step of Adam."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    is_distributed = sharding != "plain"
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=is_distributed, overlap_grad_reduce=False)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    how = OptimizerConfig(
        optimizer="adam", lr=1e-2, weight_decay=0.1, use_distributed_optimizer=is_distributed, params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(how, [wrapped])
    for group in optimizer.param_groups:  # as its scheduler does at each step
        group["weight_decay"] = how.weight_decay * group["wd_mult"]

    def step() -> None:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        wrapped(tokens, places(tokens), None, labels=tokens.roll(-1, 1)).mean().backward()
        finalize_model_grads([wrapped])
        optimizer.step()

    return optimizer, step


def places(tokens: torch.Tensor) -> torch.Tensor:
    """The positions of tokens."""
    return torch.arange(tokens.shape[1])[None].expand_as(tokens)


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor | None:
    """Logits of all tokens, on the last stage; None elsewhere."""
    before = torch.empty(tokens.shape[1], tokens.shape[0], ARGS["hidden_size"], dtype=next(model.parameters()).dtype)
    if not model.pre_process:
        dist.recv(before, dist.get_rank() - dist.get_world_size() // 2)
        model.set_input_tensor(before)
    if model.post_process:
        model.output_layer.gather_output = True
    found = model(tokens, places(tokens), None)
    if model.post_process:
        model.output_layer.gather_output = False  # as the loss needs it
    if not model.post_process:
        dist.send(found.contiguous(), dist.get_rank() + dist.get_world_size() // 2)
        return None
    return found


def main() -> None:
    """Train, save the checkpoint, and what the model answers: `reference.pt` beside it."""
    warnings.filterwarnings("ignore")
    folder, tp, pp, sharding = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    dtype = torch.bfloat16 if "bf16" in sys.argv else torch.float32
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.transformer.enums import AttnBackend

    parallel_state.initialize_model_parallel(tp, pp)
    on_cpu()
    model = build(tp, pp, dtype)
    tokens = torch.randint(0, ARGS["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(1))
    optimizer, step = (None, None) if sharding == "none" else trainer(model, sharding, dtype, tokens)
    for _ in range(STEPS if step else 0):
        step()
    metadata = {} if sharding in ("none", "plain") else {"distrib_optim_sharding_type": sharding}
    state: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=False, metadata=metadata)
    others = {"exit_signal": signal.SIGTERM, "attention_backend": AttnBackend.auto, "params_dtype": dtype}
    state["args"] = argparse.Namespace(**ARGS, **others, save=str(folder), data_path=None, iteration=STEPS)
    state |= {"iteration": STEPS, "checkpoint_version": 3.0, "content_metadata": metadata}
    state["opt_param_scheduler"] = {"max_lr": 1e-2, "num_steps": STEPS}
    iteration = folder / f"iter_{STEPS:07d}"
    if dist.get_rank() == 0:
        iteration.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(iteration))
    said = {"tokens": tokens, "logits": logits(model, tokens)}
    if step:
        step()
        said["next_logits"] = logits(model, tokens)
    if said["logits"] is not None and dist.get_rank() == dist.get_world_size() - 1:
        torch.save(
            {name: one.float() if one.is_floating_point() else one for name, one in said.items()},
            folder / "reference.pt",
        )
    if dist.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
