"""Whether a run was trained on conversations: its checkpoints say so. For those of older versions, its data is looked
at."""

from __future__ import annotations

from pathlib import Path

from shoal.config.recipe import DataSection
from shoal.data.sources.chat.form import CONVERSATIONS, TEXT
from shoal.data.sources.chat.rows import ROW_ENDINGS, read_rows
from shoal.data.sources.open import WORDS, local_path, source_kind
from shoal.data.sources.remote.download import is_url
from shoal.errors import ShoalError
from shoal.train.inference.trained_model import TrainedModel


def is_of_conversations(trained: TrainedModel) -> bool:
    """Whether a model was trained on conversations, alone or in a mixture."""
    saved = trained.step.manifest.state.get("prompts")
    return saved == CONVERSATIONS if saved in (CONVERSATIONS, TEXT) else any(map(_looks_so, trained.recipe.data.each))


def _looks_so(data: DataSection) -> bool:
    """Whether the data, as it is now, is conversations."""
    source = str(data.source)
    if source in WORDS or source.startswith("hf:") or data.format not in ("auto", "chat"):
        return False
    path = Path(source).expanduser()
    if not is_url(source) and not path.exists():
        if path.suffix.lower() not in {*ROW_ENDINGS, ""}:
            return False
        raise ShoalError(
            f"the checkpoint does not say whether it was trained on conversations, and {source} is not there",
            fix="--raw for plain text; or restore the data",
            code="D102",
        )
    return source_kind(data) == "chat" and bool(next(read_rows(local_path(data))).turns[0].role)
