"""Write the model of a run with its LoRA added to its weights."""

from __future__ import annotations

from pathlib import Path

from shoal.checkpoint.formats import huggingface
from shoal.checkpoint.formats.export import Exported, ExportSettings, write_tensors
from shoal.checkpoint.formats.lazy_tensor import in_memory
from shoal.checkpoint.storage.shard_file import NAMES
from shoal.errors import ShoalError
from shoal.parallel.lora.apply import merge_lora
from shoal.parallel.lora.layers import adapted_layers
from shoal.train.inference.trained_model import trained_model


def write_merged(directory: Path, step: int | None, to: Path, how: ExportSettings) -> tuple[int, Exported]:
    """Merge and write; returns the step, and what was written."""
    trained = trained_model(directory, step)
    if not adapted_layers(trained.model):
        raise ShoalError(
            f"{trained.step.path} must hold adapters to merge, got a whole model",
            fix=f"shoal checkpoint export {directory} {to}",
            code="L015",
        )
    merged = merge_lora(trained.model)
    buffers = dict(merged.named_buffers())  # such as the bias of a router; those that are not saved are computed anew
    saved = {name: tensor for name, tensor in merged.state_dict().items() if name in buffers}
    state = dict(merged.named_parameters()) | saved
    tensors = {name: in_memory(NAMES[tensor.dtype], tensor.detach()) for name, tensor in state.items()}
    section = {k: v for k, v in trained.recipe.model.model_dump(mode="json").items() if k != "lora"}
    extra = huggingface.Extra()
    if how.format == "huggingface":
        tensors, extra = huggingface.for_export(section, tensors)
    return trained.step.manifest.step, write_tensors(tensors, to, how, extra, lambda size: None)
