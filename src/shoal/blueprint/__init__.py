"""Values without processes, devices or torch that say what should happen. Planner and runtime read the same ones."""

from __future__ import annotations

from shoal.blueprint.description import Description as Description
from shoal.blueprint.description import Split as Split
from shoal.blueprint.layout import AXES as AXES
from shoal.blueprint.layout import Layout as Layout
from shoal.blueprint.plan import Plan as Plan
