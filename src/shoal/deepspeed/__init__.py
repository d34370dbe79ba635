"""DeepSpeed's interface on shoal: `import shoal.deepspeed as deepspeed` in a script that has `deepspeed.initialize`.

engine, optimizer, loader, schedule = shoal.deepspeed.initialize(model=model, config="ds_config.json")
for x, y in loader:
    loss = F.cross_entropy(engine(x), y)
    engine.backward(loss)
    engine.step()
"""

from typing import Any

from shoal.deepspeed import members
from shoal.deepspeed.api import add_config_arguments as add_config_arguments
from shoal.deepspeed.api import init_distributed as init_distributed
from shoal.deepspeed.api import initialize as initialize
from shoal.deepspeed.engine import Engine as Engine
from shoal.deepspeed.schedules import WarmupCosineLR as WarmupCosineLR
from shoal.deepspeed.schedules import WarmupDecayLR as WarmupDecayLR
from shoal.deepspeed.schedules import WarmupLR as WarmupLR


def __getattr__(name: str) -> Any:
    """Say what there is in place of a part of DeepSpeed."""
    if name.startswith("__"):
        raise AttributeError(name)
    known = (*members.OF_PACKAGE, "add_config_arguments", "init_distributed", "initialize", "Engine", "WarmupLR")
    raise members.missing("shoal.deepspeed", name, members.OF_PACKAGE, known)
