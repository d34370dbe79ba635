"""Conversations: rows, tokens, which of them are trained, and samples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.config.recipe import DataSection
from shoal.data.batch import IGNORE
from shoal.data.sources.chat.encode import PlainChat
from shoal.data.sources.chat.form import prompt_form
from shoal.data.sources.chat.open import open_chat_tokenizer
from shoal.data.sources.chat.turns import Row, Turn, row_of
from shoal.data.sources.open import open_datasets
from shoal.data.sources.tokenizer import open_tokenizer
from tests.rejects import rejects

END = 256
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
ROWS: list[dict[str, Any]] = [
    CHAT,
    {"instruction": "a", "input": "b", "output": "cd"},
    {"prompt": "x", "completion": "yz"},
]


def written(folder: Path, *rows: object) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def text_of(tokens: Any) -> str:
    return "".join("$" if token == END else chr(token) for token in tokens)


def trained_text(batch: Any, row: int) -> str:
    labels = batch["labels"][row].tolist()
    assert all(label in (IGNORE, following) for label, following in zip(labels, batch["tokens"][row, 1:], strict=False))
    return text_of(label for label in labels if label != IGNORE)


def test_only_answers_are_trained(tmp_path: Path) -> None:
    data, held_out = open_datasets(DataSection(source=written(tmp_path, *ROWS), seq_len=48, validation=0), 0)
    assert (len(data), len(held_out)) == (3, 0)
    batch = data.batch(np.arange(3))
    assert set(batch) == {"tokens", "labels"}
    assert [trained_text(batch, row) for row in range(3)] == ["yo$", "cd$", "yz$"]
    assert text_of(batch["tokens"][0]).rstrip("$") == "<|user|>\nhi\n<|assistant|>\nyo"
    assert text_of(batch["tokens"][1]).rstrip("$") == "<|user|>\na\n\nb\n<|assistant|>\ncd"
    assert text_of(batch["tokens"][2]).rstrip("$") == "xyz"


def test_weights_systems_and_histories_are_honoured(tmp_path: Path) -> None:
    answers = [{"role": "assistant", "content": "no", "weight": 0}, {"role": "assistant", "content": "yo", "weight": 1}]
    rows = (
        {"messages": answers, "id": 7, "source": "x", "images": [], "label": 3},
        {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]},
    )
    data = open_datasets(DataSection(source=written(tmp_path, *rows), seq_len=99, validation=0), 0)[0]
    batch = data.batch(np.arange(2))
    assert [trained_text(batch, row) for row in range(2)] == ["yo$", "b$d$"]
    expected = "<|system|>\ns\n<|user|>\na\n<|assistant|>\nb$<|user|>\nc\n<|assistant|>\nd$"
    assert text_of(batch["tokens"][1]).startswith(expected)


def test_packed_examples_have_documents_of_their_own(tmp_path: Path) -> None:
    section = DataSection(source=written(tmp_path, *ROWS), seq_len=48, validation=0, pack=True)
    batch = open_datasets(section, 0)[0].batch(np.arange(2))
    assert [trained_text(batch, row) for row in range(2)] == ["yo$", "cd$yz$"]
    for row, numbers in enumerate(([29, 19], [31, 4, 13])):
        assert np.unique(batch["documents"][row], return_counts=True)[1].tolist() == numbers


def test_the_form_of_prompts(tmp_path: Path) -> None:
    def form(**settings: Any) -> str:
        return prompt_form(open_datasets(DataSection(seq_len=32, **{"validation": 0, **settings}), 0)[0])

    (tmp_path / "rows").mkdir()
    (tmp_path / "text.txt").write_text("some text" * 30)
    chat, plain = written(tmp_path / "rows", *ROWS), written(tmp_path, *[ROWS[2]] * 4)
    assert form(source=chat) == form(source=str(tmp_path / "rows"), validation=0.4) == "conversations"
    assert form(source=plain) == form(source=str(tmp_path / "text.txt")) == form(source="synthetic") == "text"
    assert form(source=[{"source": plain, "weight": 1}, {"source": chat, "weight": 1}]) == "conversations"


def test_several_answers_and_a_long_one(tmp_path: Path) -> None:
    two = {"messages": [*CHAT["messages"], {"role": "user", "content": "more"}, {"role": "assistant", "content": "no"}]}
    section = DataSection(source=written(tmp_path, two, CHAT), seq_len=40, validation=0)
    data = open_datasets(section, 0)[0]
    assert trained_text(data.batch(np.arange(1)), 0) == "yo$"  # the second answer is cut off
    assert "1 examples cut at 40 tokens" in data.describe()
    long = {"messages": [{"role": "user", "content": "q" * 60}, CHAT["messages"][-1]]}
    section = DataSection(source=written(tmp_path, long, CHAT), seq_len=40, validation=0)
    data = open_datasets(section, 0)[0]
    assert len(data) == 1
    assert "1 examples cut at 40 tokens, 1 without an answer left out" in data.describe()


@pytest.mark.parametrize(
    ("code", "row", "value"),
    [
        ("D070", {"text": "x"}, "got text"),
        ("D070", {"messages": []}, "list of messages"),
        ("D070", {"messages": [{"content": "x"}]}, "role"),
        ("D070", {"prompt": "x", "completion": 3}, "int"),
        ("D071", {"messages": [{"role": "user", "content": "x"}]}, "line 2"),
        ("D070", {"messages": [{"role": "assistant", "content": None}]}, "NoneType"),
        ("D070", {"instruction": "a", "output": "b", "history": [["q"]]}, "pairs"),
        ("D070", {**CHAT, "tools": "no"}, "tools"),
        ("D071", {"messages": [{"role": "assistant", "content": "x", "weight": 0}]}, "answer"),
        (
            "D071",
            {"messages": [{"role": "human", "content": "x"}, {"role": "gpt", "content": "y"}]},
            "roles human, gpt",
        ),
        ("D101", {"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}, "0.5"),
        ("D101", {"messages": [{"role": "user", "content": "x", "weight": 1}]}, "'user'"),
        ("D100", {**CHAT, "tools": [{"name": "f"}]}, "'tools'"),
        ("D100", {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]}, "'tool_calls'"),
        ("D100", {"messages": [{"role": "assistant", "content": "x", "train": False}]}, "'train'"),
        ("D100", {**CHAT, "images": ["a.png"]}, "'images'"),
        ("D100", {**CHAT, "history": [["q", "a"]]}, "'history'"),
        ("D100", {"prompt": "x", "completion": "y", "system": "z"}, "'system'"),
        ("D100", {"prompt": "x", "completion": "y", "label": False}, "'label'"),
    ],
)
def test_rejected_rows(tmp_path: Path, code: str, row: object, value: str) -> None:
    with rejects(code, value, "line 2"):
        open_datasets(DataSection(source=written(tmp_path, CHAT, row), format="chat", validation=0), 0)


def test_answers_after_the_end_of_a_sample_are_rejected(tmp_path: Path) -> None:
    with rejects("D074", "--data.seq_len 29"):
        open_datasets(DataSection(source=written(tmp_path, CHAT), seq_len=16, validation=0), 0)


TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<e>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder of transformers: every character is a token, and <e> ends a message."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("tokenizer")
    characters = sorted(set("[]abcdefghijklmnopqrstuvwxyz "))
    vocabulary = {"<e>": 0, **{one: number for number, one in enumerate(characters, 1)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<e>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.add_special_tokens(["<e>"])
    made.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<e>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_the_template_of_a_folder(folder: Path) -> None:
    pytest.importorskip("transformers")
    chat = open_chat_tokenizer(str(folder))
    row = (
        Turn("user", "hi", False),
        Turn("assistant", "yo", True),
        Turn("user", "so", False),
        Turn("assistant", "ok", True),
    )
    example = chat.encode(Row(row))
    text = chat.tokenizer.text
    assert "".join(text([int(t)]) or "$" for t in example.tokens) == "[user]hi$[assistant]yo$[user]so$[assistant]ok$"
    kept = example.tokens[example.is_trained.astype(bool)]
    assert "".join(text([int(t)]) or "$" for t in kept) == "yo$ok$"
    assert "".join(text([t]) or "$" for t in chat.prompt(Row(row[:1]))) == "[user]hi$[assistant]"
    assert chat.tokenizer.end_token == 0
    assert chat.end_tokens() == {0}


def test_the_token_after_an_answer_is_an_end_token(folder: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    with_template(folder, tmp_path, TEMPLATE.replace("<e>", "\n<im>\n"))
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.add_special_tokens(["<im>"])
    made.save(str(tmp_path / "tokenizer.json"))
    assert open_chat_tokenizer(str(tmp_path)).end_tokens() == {0, made.token_to_id("<im>")}
    assert with_template(folder, tmp_path, TEMPLATE.replace("<e>", " ")).end_tokens() == {0}


def with_bos(folder: Path, path: Path) -> None:
    """The tokenizer folder, with a post-processor that puts <e> around a text, and BOS in its template."""
    tokenizers = pytest.importorskip("tokenizers")
    with_template(folder, path, "{{ bos_token }}" + TEMPLATE)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<e>"}))
    made = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<e> $A <e>", pair="$A $B", special_tokens=[("<e>", 0)]
    )
    made.save(str(path / "tokenizer.json"))


def test_documents_and_rows_begin_once_with_bos(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    with_bos(folder, tmp_path)
    chat, own = open_chat_tokenizer(str(tmp_path)), open_tokenizer(str(tmp_path))
    plain = PlainChat(own)
    assert own.begin_tokens == (0,)
    assert open_tokenizer(str(folder)).begin_tokens == ()
    of_transformers = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert own.encode([b"ab", b"<e>c"]).tolist() == [
        *of_transformers("ab")["input_ids"],
        *of_transformers("c")["input_ids"],
    ]
    assert len(own.ids("ab")) == 2

    def text(one: Any, row: Any) -> str:
        example = one.encode(row_of(row, "line 1"))
        found = "".join(own.text([int(t)]) or "$" for t in example.tokens)
        assert "".join(found[at] for at in np.flatnonzero(example.is_trained)) == ("yz$" if "prompt" in row else "yo$")
        return found

    assert text(chat, CHAT) == "$[user]hi$[assistant]yo$"
    assert text(chat, ROWS[2]) == text(plain, ROWS[2]) == "$xyz$"
    assert text(plain, {"prompt": "<e>x", "completion": "yz"}) == "$xyz$"
    assert chat.prompt(Row((Turn("", "x", False),))) == [0, *own.ids("x")]
    assert len(chat.prompt(Row((Turn("user", "hi", False),)))) == len("$[user]hi$[assistant]")


def test_a_template_that_changes_earlier_messages_is_rejected(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    last_only = with_template(folder, tmp_path, "{% for m in messages[-1:] %}{{ m.content }}{% endfor %}")
    with rejects("D073", str(tmp_path)):
        last_only.encode(Row((Turn("assistant", "a", True), Turn("assistant", "b", True))))
    with rejects("D072", "no"):
        with_template(folder, tmp_path, "{{ raise_exception('no') }}").encode(Row((Turn("assistant", "a", True),)))


TOOL_TEMPLATE = """{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for m in messages %}[{{ m.role }}]\
{{ m.content or '' }}{% for c in m.tool_calls or [] %}[{{ c.name }} {{ c.arguments.x }}]{% endfor %}<e>{% endfor %}\
{% if add_generation_prompt %}[assistant]{% endif %}"""
CALL = {"name": "f", "arguments": '{"x": "a"}'}
CALLING = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
TOOLS = {"messages": [*CALLING, {"role": "tool", "content": "b"}, {"role": "assistant", "content": "ok"}]}
TOOLS |= {"tools": [{"name": "f"}]}  # type: ignore[dict-item]


def with_template(folder: Path, path: Path, template: str) -> Any:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return open_chat_tokenizer(str(path))


def test_tools_and_their_calls_reach_the_template(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    chat = with_template(folder, tmp_path, TOOL_TEMPLATE)
    example = chat.encode(row_of(TOOLS, "line 1"))
    text = ["".join(chat.tokenizer.text([int(t)]) or "$") for t in example.tokens]
    assert "".join(text) == "[f][user]hi$[assistant][f a]$[tool]b$[assistant]ok$"
    assert "".join(np.array(text)[example.is_trained.astype(bool)]) == "[f a]$ok$"


@pytest.mark.parametrize("shown", ["c.name + c.arguments", "c.name ~ c.arguments"])
def test_a_template_that_takes_arguments_as_json_gets_them_so(folder: Path, tmp_path: Path, shown: str) -> None:
    """The first fails with an object, the second shows it as Python does."""
    pytest.importorskip("transformers")
    chat = with_template(folder, tmp_path, TOOL_TEMPLATE.replace("c.name }} {{ c.arguments.x", shown))
    assert '[f{"x": "a"}]' in chat._render(row_of(TOOLS, "line 1"))  # the tokenizer of the tests has no quotes


@pytest.mark.parametrize(
    ("template", "key"),
    [
        (TOOL_TEMPLATE.replace("m.tool_calls", "none"), "'tool_calls'"),
        (TOOL_TEMPLATE.replace("in tools", "in none"), "'tools'"),
        (TOOL_TEMPLATE.replace("m.content or ''", "m.content"), "'content'"),
    ],
)
def test_a_template_that_leaves_out_a_key_is_rejected(folder: Path, tmp_path: Path, template: str, key: str) -> None:
    pytest.importorskip("transformers")
    with rejects("D100", key, "line 1"):
        with_template(folder, tmp_path, template).encode(row_of(TOOLS, "line 1"))


@pytest.mark.parametrize("start", ["", "\ufeff", "\n  "])
def test_rows_in_one_array_are_not_trained_as_text(tmp_path: Path, start: str) -> None:
    """The command of the fix makes conversations of them."""
    file = tmp_path / "al p.json"
    file.write_text(start + json.dumps([ROWS[1], CHAT], indent=2), encoding="utf-8")
    for source, form in ((file, "auto"), (file, "chat"), (file, "jsonl"), (tmp_path, "auto")):
        with rejects("D038", "al p.json", "--data.format text") as caught:
            open_datasets(DataSection(source=str(source), format=form, validation=0), 0)
    command = caught.value.problems[0].fix.partition(", and --data.source")[0].replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True)
    data, _ = open_datasets(DataSection(source=str(file.with_suffix(".jsonl")), seq_len=48, validation=0), 0)
    assert "2 conversations" in data.describe()
    as_text, _ = open_datasets(DataSection(source=str(file), format="text", seq_len=8, validation=0), 0)
    assert "text file" in as_text.describe()


def test_other_json_is_text(tmp_path: Path) -> None:
    (tmp_path / "numbers.json").write_text("[1, 2, 3] " * 20)
    data, _ = open_datasets(DataSection(source=str(tmp_path / "numbers.json"), seq_len=8, validation=0), 0)
    assert "text file" in data.describe()
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    open_datasets(DataSection(source=str(tmp_path), seq_len=8, validation=0), 0)  # one array in a corpus


def test_rows_of_sharegpt_name_messages(tmp_path: Path) -> None:
    row = {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}
    with rejects("D018", 'fix: lines such as {"messages"', '"role"', '"content"'):
        open_datasets(DataSection(source=written(tmp_path, row), validation=0), 0)
