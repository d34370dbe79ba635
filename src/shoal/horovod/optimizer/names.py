"""Names of parameters, by which ranks find each other's gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from shoal.errors import ShoalError


def checked_names(param_groups: list[dict[str, Any]], named: Iterable[Any] | None) -> dict[Tensor, str]:
    """Return a name for every parameter of an optimizer; without `named`, by group and position."""
    if named is None:
        places = enumerate(param_groups)
        return {p: f"noname.{i}.{j}" for i, group in places for j, p in enumerate(group["params"])}
    pairs = list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        what = "named_parameters must be tuples of name and parameter"
        raise ShoalError(what, fix="named_parameters=model.named_parameters()", code="H012")
    repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if repeated:
        what = f"names of parameters must be unique, got {', '.join(repeated)} more than once"
        raise ShoalError(what, fix="named_parameters=model.named_parameters(), of one module", code="H012")
    names = {parameter: name for name, parameter in pairs}
    unnamed = [p for group in param_groups for p in group["params"] if p not in names]
    if unnamed:
        what = f"named_parameters must name every parameter of the optimizer, {len(unnamed)} are missing"
        raise ShoalError(what, fix="named_parameters=model.named_parameters()", code="H012")
    return names
