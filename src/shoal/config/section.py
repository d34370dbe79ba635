"""The base of all sections of a recipe, and the kinds of numbers in them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

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


class Section(BaseModel):
    """A section of a recipe: frozen, and without unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
