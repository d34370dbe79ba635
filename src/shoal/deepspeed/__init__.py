"""DeepSpeed's interface on shoal: `import shoal.deepspeed as deepspeed` in a script that has `deepspeed.initialize`.

engine, optimizer, loader, schedule = shoal.deepspeed.initialize(model=model, config="ds_config.json")
for x, y in loader:
    loss = F.cross_entropy(engine(x), y)
    engine.backward(loss)
    engine.step()
"""

from typing import Any

from shoal.deepspeed.api import add_config_arguments as add_config_arguments
from shoal.deepspeed.api import init_distributed as init_distributed
from shoal.deepspeed.api import initialize as initialize
from shoal.deepspeed.engine import Engine as Engine
from shoal.deepspeed.schedules import WarmupCosineLR as WarmupCosineLR
from shoal.deepspeed.schedules import WarmupDecayLR as WarmupDecayLR
from shoal.deepspeed.schedules import WarmupLR as WarmupLR

_INSTEAD = {
    "zero": "build the model as usual; engine.run.weights() has whole weights",
    "comm": "torch.distributed",
    "ops": "torch.optim.AdamW, or the optimizer of the config",
    "checkpointing": "torch.utils.checkpoint",
    "accelerator": "torch.accelerator",
    "pipe": "shoal.Run('pp=2 mb=1') with run.step(batch)",
    "PipelineModule": "shoal.Run('pp=2 mb=1') with run.step(batch)",
    "moe": "shoal.Run('ep=2') with a model that has experts",
    "init_inference": "shoal generate",
    "DeepSpeedEngine": "shoal.deepspeed.Engine",
}


def __getattr__(name: str) -> Any:
    """Say what there is in place of a part of DeepSpeed."""
    what = f"shoal.deepspeed has no {name!r}"
    raise AttributeError(f"{what}; {_INSTEAD[name]} is in its place" if name in _INSTEAD else what)
