"""Plans, layouts, schedules and collectives as values without processes, devices or torch.

Planner and runtime read the same values.
"""

from __future__ import annotations

from shoal.blueprint.description import Description as Description
from shoal.blueprint.description import Split as Split
from shoal.blueprint.layout import AXES as AXES
from shoal.blueprint.layout import Layout as Layout
from shoal.blueprint.plan import Plan as Plan
