"""Reject sources that cannot be mixed: files in two of them, samples of different kinds, tokens of two tokenizers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from shoal.data.dataset import Dataset, Part
from shoal.data.interleave import LONGEST_PERIOD
from shoal.errors import Problem, ShoalError


def check_overlaps(sources: Sequence[str]) -> Iterator[Problem]:
    """Find sources that hold the same files: held-out samples of one would be trained on in the other."""
    places = [(name, _place(name)) for name in sources]
    for (one, first), (other, second) in itertools.combinations(places, 2):
        if first == second or first in second.parents or second in first.parents:
            yield Problem(
                "D082",
                f"sources of a mixture must have no file in common, got {one!r} and {other!r}",
                "--data.source with other paths, or without one of the two",
            )


def _place(source: str) -> Path:
    """The real path of a source. URLs and words are paths of their own."""
    is_path = "://" not in source and not source.startswith("hf:") and os.path.exists(os.path.expanduser(source))
    return Path(source).expanduser().resolve() if is_path else Path(source)


def check_fit(sources: Sequence[str], members: Sequence[Dataset], is_tokenized: Sequence[bool]) -> Iterator[Problem]:
    """Find samples that cannot be in one batch, or whose labels mean different things."""
    forms = [_form(member) for member in members]
    for name, form in zip(sources[1:], forms[1:], strict=True):
        if form != forms[0]:
            yield Problem(
                "D083",
                f"samples of a mixture must have the same tensors, got {forms[0]} in {sources[0]}, {form} in {name}",
                "--data.source with sources of one kind; conversations have documents with --data.pack true, text with"
                " --data.mask_documents true",
            )
    yield from _check_classes(sources, members)
    yield from _check_tokenizer(sources, members, is_tokenized)


def _form(member: Dataset) -> str:
    """The tensors of a sample, with their shapes and dtypes."""
    batch = member.batch(np.arange(1))
    return ", ".join(
        f"{key} {tuple(tensor.shape[1:])} {str(tensor.dtype).removeprefix('torch.')}" for key, tensor in batch.items()
    )


def _check_classes(sources: Sequence[str], members: Sequence[Dataset]) -> Iterator[Problem]:
    """Labels are numbers of classes, so all sources must have the same names of classes."""
    if members[0].task not in ("image class", "text class"):
        return
    every = [_classes(member) for member in members]
    for name, classes in zip(sources[1:], every[1:], strict=True):
        if classes != every[0]:
            yield Problem(
                "D084",
                f"the sources of a mixture must have the same classes, got {_listed(every[0])} in {sources[0]},"
                f" {_listed(classes)} in {name}",
                "the same names of folders, or of labels, in all sources",
            )


def _classes(member: Dataset) -> tuple[str, ...]:
    whole = member.whole if isinstance(member, Part) else member
    return tuple(getattr(whole, "classes", ("generated ones",))) or ("numbers",)


def _listed(classes: Sequence[str]) -> str:
    return ", ".join(classes[:4]) + (f" and {len(classes) - 4} more" if len(classes) > 4 else "")


def _check_tokenizer(
    sources: Sequence[str], members: Sequence[Dataset], is_tokenized: Sequence[bool]
) -> Iterator[Problem]:
    """Token shards beside text must be of the tokenizer of the text. Ids above its last are of another one."""
    rows = list(zip(sources, members, is_tokenized, strict=True))
    known = next((member.vocabulary for _, member, is_text in rows if is_text), None)
    for name, member, is_text in rows:
        if known is not None and not is_text and member.vocabulary is not None and member.vocabulary > known:
            yield Problem(
                "D085",
                f"the token ids of {name} go up to {member.vocabulary - 1:,}, and data.tokenizer has {known:,} tokens",
                "--data.tokenizer PATH of the tokenizer that made the token shards",
            )


def too_uneven(weights: Mapping[str, float]) -> ShoalError:
    """The error of weights that no period of positions has."""
    name, least = min(weights.items(), key=lambda pair: pair[1])
    share = least / sum(weights.values())
    return ShoalError(
        f"the share of a source must be a number of up to 5 digits, or 0.0005 and more, got {share:.3g} for {name}",
        fix=f"--data.source with a weight of {1 / LONGEST_PERIOD:g} of the sum, or more, for {name}",
        code="D086",
    )
