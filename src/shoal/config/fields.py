"""The types of a recipe's settings, and what its sections share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from shoal.blueprint.plan import Plan
from shoal.config.duration import Duration
from shoal.errors import ShoalError


def _not_bool(value: Any) -> Any:
    """Reject booleans, which Python accepts as 0 and 1."""
    if isinstance(value, bool):
        raise ShoalError(f"it must be a number, got {value}", fix="1", code="R014")
    return value


Number = BeforeValidator(_not_bool)
PositiveInt = Annotated[int, Number, Field(gt=0)]
PositiveFloat = Annotated[float, Number, Field(gt=0)]
NotNegative = Annotated[float, Number, Field(ge=0)]
Fraction = Annotated[float, Number, Field(ge=0, le=1)]
BelowOne = Annotated[float, Number, Field(ge=0, lt=1)]

DurationField = Annotated[
    Duration,
    BeforeValidator(lambda value: value if isinstance(value, Duration) else Duration.parse(value)),
    PlainSerializer(str),
    WithJsonSchema({"type": ["string", "integer"], "examples": ["1000step", "2epoch", "1e9tok", "10min"]}),
]
PlanField = Annotated[
    Plan,
    BeforeValidator(lambda value: Plan.of(value)),
    PlainSerializer(str),
    WithJsonSchema({"type": ["string", "object"], "examples": ["auto", "dp_replicate=2 zero=0 mb=4"]}),
]


class Section(BaseModel):
    """A section of a recipe: frozen, and without unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
