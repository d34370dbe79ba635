"""Whether data is conversations or plain text. It decides the form of prompts for the trained model."""

from __future__ import annotations

from shoal.data.dataset import Dataset, Part
from shoal.data.mixture import Union
from shoal.data.sources.chat.examples import Examples

CONVERSATIONS, TEXT = "conversations", "text"
"""The values of `prompts` in the state of a checkpoint."""


def prompt_form(dataset: Dataset) -> str:
    """`conversations` if some samples are, alone or in a mixture. Rows of a prompt and a completion are plain text."""
    return CONVERSATIONS if _has_conversations(dataset) else TEXT


def _has_conversations(dataset: Dataset) -> bool:
    if isinstance(dataset, Union):
        return any(map(_has_conversations, dataset.members))
    if isinstance(dataset, Part):
        return _has_conversations(dataset.whole)
    return isinstance(dataset, Examples) and dataset.has_conversations
