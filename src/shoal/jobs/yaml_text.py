"""Write YAML that people read: texts of several lines are shown as such, and nothing is shortened to an alias."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def dump(documents: Iterable[Any]) -> str:
    """The documents as YAML, in the order of their keys."""
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000)
    return text
