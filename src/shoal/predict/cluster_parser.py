"""From text to a `Cluster`: presets with a size (`h100:8x16`), YAML files, and `here`, this machine as measured."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError, listed, nearest
from shoal.predict.cluster import Cluster, Device, Tier
from shoal.predict.presets.clusters import DEVICES, TIERS, preset
from shoal.safe_parsing import parse_yaml, read_text

HERE = "here"
"""The name of this machine."""


def here_file() -> Path:
    """Where a machine's own measurement is kept: written by `shoal calibrate`, read by `--cluster here`."""
    try:
        return Path.home() / ".config" / "shoal" / "here.yaml"
    except RuntimeError:  # a user without an entry in the password database, as in some containers
        what = "the measurement of this machine is kept in the home directory, and this user has none"
        raise ShoalError(what, fix="export HOME=/a/folder; or a preset: --cluster h100:8", code="Q018") from None


def is_measured_here() -> bool:
    """Whether there is a measurement of this machine that this user may look for."""
    try:
        return os.path.exists(here_file())  # False, where Path.exists raises, for what may not be looked at
    except ShoalError:
        return False


def parse_cluster(text: str) -> Cluster:
    """A preset with a size (`h200:8`, `h100:8x16`), the path of a YAML file, or the machine at hand as `shoal
    calibrate` has measured it: `here`. A file and `here` take another size as well: `here:4`, `lab.yaml:8x2`."""
    if _is_path(text):
        path, size = _path_and_size(text)
        return _sized(cluster_from_yaml(Path(path)), path, size)
    name, _, size = text.partition(":")
    name = name.strip().lower()
    if name == HERE:
        return _here(size)
    if name not in DEVICES:
        longer = [f"{known}:{size or 8}" for known in DEVICES if known.startswith(name)]
        near = nearest(name, DEVICES)
        others = f"{f'{near}:{size or 8}? ' * bool(near)}There are {', '.join(DEVICES)}; or the path of a YAML file"
        raise ShoalError(
            f"there is no preset of a device {name!r}", fix=listed(longer) if longer else others, code="Q014"
        )
    per_node, nodes = _size(name, size or str(DEVICES[name].per_node))
    return preset(name, per_node=per_node, nodes=nodes)


def _here(size: str) -> Cluster:
    """The machine at hand, with as many devices as were measured or as the size says."""
    path = here_file()
    if not os.path.exists(path):
        what = f"no calibration of this machine found: {path} does not exist"
        raise ShoalError(what, fix="shoal calibrate, which takes a minute; or a preset such as h100:8", code="Q019")
    return _sized(cluster_from_yaml(path), HERE, size)


def cluster_from_mapping(mapping: Mapping[str, Any]) -> Cluster:
    """From keys and values, such as those of a YAML file. `like` names a preset that they change: `{"like":
    "h100:8x4", "between": "ethernet-100", "price": 2}`."""
    mapping = {key: _named_tier(value) if key in ("inside", "between") else value for key, value in mapping.items()}
    if "like" in mapping:
        mapping = _changed(_preset(mapping.pop("like")).to_mapping(), mapping)
    for key, kind in (("device", Device), ("inside", Tier), ("between", Tier)):
        if key not in mapping:
            fix = f"{key}: with {listed(_keys(kind))}; or like: h100:8, and what is different"
            raise ShoalError(f"the cluster does not say its {key}", fix=fix, code="Q020")
        mapping[key] = _build(kind, mapping[key], key)
    built: Cluster = _build(Cluster, mapping, "the cluster")
    return built


def cluster_from_yaml(path: Path) -> Cluster:
    """From a file, such as one that `shoal calibrate` has written."""
    try:
        text = read_text(path, fix="shoal calibrate writes one")
    except OSError as error:
        fix = "shoal calibrate writes one, or say a preset such as h100:8x2"
        raise ShoalError(f"the cluster file {path} cannot be read: {error.strerror}", fix=fix, code="Q021") from error
    mapping = parse_yaml(text, str(path), "shoal calibrate writes one")
    if not isinstance(mapping, Mapping):
        raise ShoalError(f"{path} holds no keys and values", fix="shoal calibrate writes one", code="Q021")
    return cluster_from_mapping(mapping)


def _size(name: str, size: str) -> tuple[int, int]:
    """Devices of a node, and nodes, as they are written behind the name of a cluster.

    >>> _size("h100", "8x16"), _size("h100", "4")
    ((8, 16), (4, 1))
    """
    match = re.fullmatch(r"(\d{1,15})(?:x(\d{1,15}))?", size.strip())
    if not match or int(match[1]) < 1 or (match[2] and int(match[2]) < 1):
        what = f"{size[:80]!r} is not a number of devices"
        raise ShoalError(what, fix=f"{name}:8 for one node of 8, {name}:8x16 for 16 of them", code="Q016")
    return int(match[1]), int(match[2] or 1)


def _sized(cluster: Cluster, name: str, size: str) -> Cluster:
    """Return the same machines in the given numbers, if any are given."""
    if not size:
        return cluster
    per_node, nodes = _size(name, size)
    return replace(cluster, per_node=per_node, nodes=nodes)


def larger(text: str) -> Iterator[str]:
    """Clusters in the form of this one, each with twice the devices of the one before: a node is filled up as far as
    such nodes usually are, then there are more nodes.

    >>> from itertools import islice
    >>> list(islice(larger("rtx4090:2"), 3)), list(islice(larger("h100:1x4"), 2)), next(larger("a/lab.yaml:4"))
    (['rtx4090:4', 'rtx4090:8', 'rtx4090:8x2'], ['h100:1x8', 'h100:1x16'], 'a/lab.yaml:4x2')
    """
    name, size = _path_and_size(text) if _is_path(text) else (text.partition(":")[0], text.partition(":")[2])
    says_nodes, preset = "x" in size, DEVICES.get(name.strip().lower())
    per_node, nodes = _size(name, size) if size else (0, 1)
    if not size:
        cluster = parse_cluster(text)
        per_node, nodes = cluster.per_node, cluster.nodes
    usual = preset.per_node if preset and not says_nodes else 0
    while True:
        if nodes == 1 and per_node * 2 <= usual:
            per_node *= 2
        else:
            nodes *= 2
        yield f"{name}:{per_node}x{nodes}" if nodes > 1 else f"{name}:{per_node}"


def _keys(kind: type[Any]) -> list[str]:
    return [entry.name for entry in fields(kind)]


def _build(kind: type[Any], mapping: Any, where: str) -> Any:
    """An object from its keys, each known and none missing."""
    if not isinstance(mapping, Mapping):
        raise ShoalError(
            f"{where} is {mapping!r}, not keys and values", fix=f"{where}: with {listed(_keys(kind))}", code="Q020"
        )
    types = {field.name: str(field.type) for field in fields(kind)}
    for key in mapping:
        if key not in types:
            fix = nearest(str(key), _keys(kind)) or listed(_keys(kind))
            raise ShoalError(f"{where} has no key {key!r}", fix=fix, code="Q020")
    try:
        return kind(**{key: _number(value, types[key], f"{where}: {key}") for key, value in mapping.items()})
    except TypeError as error:
        raise ShoalError(
            f"{where} is not complete: {error}", fix=f"shoal calibrate writes all of {_keys(kind)}", code="Q020"
        ) from None


def _number(value: Any, type_name: str, where: str) -> Any:
    """What a key holds, as a number if it is one; YAML takes 25e9 for a word."""
    if isinstance(value, Mapping):  # of rates by precision
        return {key: _number(rate, "float", f"{where}: {key}") for key, rate in value.items()}
    if not type_name.startswith(("float", "int")) or (value is None and "None" in type_name):
        return value
    is_whole = type_name == "int"
    try:
        number = float(value)
        is_fit = not isinstance(value, bool) and math.isfinite(number) and number >= 0
    except (TypeError, ValueError):
        is_fit = False
    if not is_fit or (is_whole and not number.is_integer()):
        kind = "a whole number" if is_whole else "a number"
        raise ShoalError(f"{where} is {value!r}, not {kind}", fix=f"{kind}, 0 or more", code="Q020")
    return int(number) if is_whole else number


def _is_path(text: str) -> bool:
    return _path_and_size(text)[0].endswith((".yaml", ".yml")) or "/" in text


def _path_and_size(text: str) -> tuple[str, str]:
    """A file, and the size behind it, if there is one.

    >>> _path_and_size("lab.yaml:8x2"), _path_and_size("a/lab.yaml")
    (('lab.yaml', '8x2'), ('a/lab.yaml', ''))
    """
    match = re.fullmatch(r"(.*\.ya?ml):(\d+(?:x\d+)?)", text)
    return (match[1], match[2]) if match else (text, "")


def _preset(name: Any) -> Cluster:
    """That a file is like; another file could be like this one, and so on."""
    if not isinstance(name, str) or _is_path(name):
        raise ShoalError(f"like: {name!r} is no preset", fix="like: h100:8x4, or like: here", code="Q014")
    return parse_cluster(name)


def _named_tier(value: Any) -> Any:
    """The keys of a kind of link that is given by its name."""
    if not isinstance(value, str):
        return value
    if value not in TIERS:
        raise ShoalError(f"there is no kind of link {value!r}", fix=nearest(value, TIERS) or listed(TIERS), code="Q020")
    return asdict(TIERS[value])


def _changed(all_of: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the changes into the first mapping, key by key, at any depth."""
    changed = {
        key: _changed(all_of[key], value)
        if isinstance(value, Mapping) and isinstance(all_of.get(key), Mapping)
        else value
        for key, value in changes.items()
    }
    return {**all_of, **changed}
