"""`shoal generate RUN --prompt TEXT`: print how the model of a run continues a text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from shoal.cli.options import parse_options
from shoal.config.data_source import spelled
from shoal.errors import Problem, ShoalError, raise_if

if TYPE_CHECKING:
    from shoal.data.sources.chat.encode import ChatTokenizer
    from shoal.train.inference.trained_model import TrainedModel


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Load a step of a run in one process and print how its model continues a prompt. A run that was trained on
    conversations gets the prompt as a user's message.

    shoal generate runs/finetune --prompt "What is the capital of France?"
    """

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The directory of a run, of its checkpoints, or of one step."""

    prompt: str
    """The text to continue."""

    step: int | None = None
    """The step. None: the newest."""

    max_tokens: int = 64
    """The largest number of new tokens."""

    temperature: float = 0.0
    """0: always the most likely token. Else a token is drawn; higher is more varied."""

    top_p: float = 1.0
    """Draw from the smallest set of tokens whose probability is at least this."""

    seed: int = 0
    """The seed of the draws."""

    tokenizer: str | None = None
    """`bytes`, a tokenizer.json or a folder with one. None: that of the run's recipe."""

    raw: bool = False
    """Continue the prompt as plain text, also after conversations."""

    device: str = "cpu"
    """cpu or cuda."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


def main(arguments: Sequence[str]) -> int:
    """Print the continuation."""
    options = parse_options(Generate, arguments, prog="shoal generate")
    raise_if(_problems(options))
    from shoal.train.inference.end_tokens import end_tokens
    from shoal.train.inference.generate import Continuation, Sampling
    from shoal.train.inference.trained_model import trained_model

    trained = trained_model(options.directory, options.step)
    _reject_other_tasks(trained)
    prompt, chat, name = _tokens(options, trained)
    tokenizer = chat.tokenizer
    made: list[int] = []
    shown = ""
    sampling = Sampling(temperature=options.temperature, top_p=options.top_p, seed=options.seed)
    continuation = Continuation(
        trained.model.to(options.device),
        prompt,
        end_tokens=end_tokens(trained.recipe.model, chat, name),
        max_tokens=options.max_tokens,
        sampling=sampling,
    )
    for token in continuation:
        made.append(token)
        if not options.json:
            shown += _show(tokenizer.text(made), shown)
    text = tokenizer.text(made)
    result = {
        "step": trained.step.manifest.step,
        "prompt": options.prompt,
        "text": text,
        "tokens": made,
        "stopped": continuation.stopped,
    }
    rest = text.removeprefix(shown) if text.startswith(shown) else f"\n{text}"  # a later token may change earlier text
    sys.stdout.write(f"{json.dumps(result) if options.json else rest}\n")
    return 0


def _show(text: str, shown: str) -> str:
    """Print what is new in a text, and return it. A character of which bytes are missing waits for them."""
    new = text.removeprefix(shown).rstrip("\ufffd") if text.startswith(shown) else ""
    sys.stdout.write(new)
    sys.stdout.flush()
    return new


def _problems(options: Generate) -> Iterator[Problem]:
    if options.max_tokens < 1:
        yield Problem("L021", f"--max-tokens must be 1 or more, got {options.max_tokens}", "--max-tokens 64")
    if options.temperature < 0:
        yield Problem("L021", f"--temperature must be 0 or more, got {options.temperature}", "--temperature 0.7")
    if not 0 < options.top_p <= 1:
        yield Problem("L021", f"--top-p must be greater than 0 and at most 1, got {options.top_p}", "--top-p 0.9")


def _reject_other_tasks(trained: TrainedModel) -> None:
    """Raise for a model of transformers that does not continue texts."""
    task = getattr(trained.model, "recipe_task", "next token")
    if task != "next token":
        name = type(trained.model).__name__
        raise ShoalError(
            f"shoal generate continues texts, and {name} of this run was trained for a {task}",
            fix=f"shoal checkpoint export {trained.step.path} FOLDER --format huggingface, and"
            f" transformers.{name}.from_pretrained(FOLDER)",
            code="L023",
        )


def _tokens(options: Generate, trained: TrainedModel) -> tuple[list[int], ChatTokenizer, str]:
    """The tokens of the prompt, as the run's data would have them, the tokenizer and its path."""
    from shoal.data.sources.chat.open import open_chat_tokenizer
    from shoal.data.sources.chat.turns import Row, Turn
    from shoal.train.inference.prompt_form import is_of_conversations

    data = trained.recipe.data
    name = options.tokenizer or data.tokenizer
    if options.tokenizer is None and all(
        one.source == "synthetic" or one.format in ("tokens", "images") for one in data.each
    ):
        raise ShoalError(
            f"the run was trained on {spelled(data.source)} data, which has no text",
            fix="--tokenizer PATH of the tokenizer that made its tokens",
            code="L022",
        )
    chat = open_chat_tokenizer(name)
    role = "user" if not options.raw and is_of_conversations(trained) else ""
    tokens = chat.prompt(Row((Turn(role, options.prompt, is_trained=False),), where="--prompt"))
    if not tokens:
        raise ShoalError("--prompt must have at least one token, got none", fix='--prompt "The"', code="L021")
    return tokens, chat, name
