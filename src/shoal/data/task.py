"""The tasks that a recipe can train: the content of a sample, and the meaning of its labels.

task           sample                            labels
next token     tokens (T)                        (T): the token after each
text class     tokens, attention_mask (T)        the number of a class
target text    tokens, attention_mask (T)        (T): the tokens of another text
image class    images (3, S, S)                  the number of a class
"""

from __future__ import annotations

from typing import Literal

Task = Literal["next token", "text class", "target text", "image class"]

FLAGS: dict[Task, str] = {
    "next token": "--data.source PATH of text, conversations or token shards",
    "text class": '--data.format classes --data.source FILE.jsonl with lines such as {"text": "...", "label": "..."}',
    "target text": '--data.format pairs --data.source FILE.jsonl with lines such as {"source": "...", "target": "..."}',
    "image class": "--data.source FOLDER with one folder of images per class, or --data.source synthetic"
    " --data.synthetic_kind images",
}
"""Task → the settings of data for it."""
