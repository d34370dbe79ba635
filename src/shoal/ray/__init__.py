"""Train a recipe or a function on a Ray cluster: `shoal.ray.Trainer`.

trainer = shoal.ray.Trainer("recipe.yaml", ray.train.ScalingConfig(num_workers=(2, 8)))
result = trainer.fit()

Ray starts, replaces and counts the workers; each is one rank. shoal plans for the number that came and resumes from its
own checkpoints below Ray's storage path. Ray is imported when a trainer is made.
"""

from __future__ import annotations

from shoal.ray.session import checkpoint_directory as checkpoint_directory
from shoal.ray.session import report as report
from shoal.ray.trainer import Trainer as Trainer
