"""Finding and calling a model's builder: shoal's own and a user's, what they describe, what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.blueprint.description import Description
from shoal.config.recipe import ModelSection
from shoal.errors import ShoalError
from shoal.models import BUILDERS
from shoal.train.build_model import build_model, describe, find_builder
from tests.rejects import rejects

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write_file(text: str, name: str = "own_model.py") -> Path:
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write_file


def test_ours_are_built_by_name() -> None:
    for name in BUILDERS:
        with torch.device("meta"):
            model = build_model(ModelSection(name=name, preset="tiny" if name != "resnet" else None))
        assert describe(model).num_outputs is not None


def test_a_users_function_gets_the_keys_as_arguments(write: Write) -> None:
    path = write("from torch import nn\ndef build(width, depth=1): return nn.Linear(width, depth)\n")
    model = build_model(ModelSection.model_validate({"name": f"{path}:build", "width": 5, "depth": 2}))
    assert isinstance(model, nn.Linear)
    assert model.weight.shape == (2, 5)
    assert describe(model) == Description()  # it says nothing of itself


def test_a_users_class_and_its_neighbours(write: Write) -> None:
    write("WIDTH = 7\n", "own_sizes.py")
    path = write(
        "from dataclasses import dataclass\nfrom torch import nn\nfrom own_sizes import WIDTH\n"
        "@dataclass\nclass Size:\n    width: int\n"
        "class Model(nn.Linear):\n    def __init__(self): super().__init__(Size(WIDTH).width, 1)\n"
    )
    model = build_model(ModelSection(name=f"{path}:Model"))
    assert tuple(model.weight.shape) == (1, 7)


def test_what_a_model_says_of_itself_is_heard_if_it_is_a_description() -> None:
    class Describing(nn.Module):
        def describe(self) -> Description:
            return Description(num_outputs=9)

    class Chatting(nn.Module):
        def describe(self) -> str:
            return "a very good model"

    assert describe(Describing()).num_outputs == 9
    assert describe(Chatting()) == Description()


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("lama", "there is no model 'lama'", "did you mean llama"),
        ("xyz", "there is no model 'xyz'", "moe, resnet or mlp, or path/to/file.py:function, or hf:FOLDER"),
        ("missing.py:build", "there is no file 'missing.py'", "path/to/file.py:function"),
        ("file.txt:build", "there is no model 'file.txt:build'", "path/to/file.py:function"),
    ],
)
def test_names_that_are_refused(name: str, what: str, fix: str) -> None:
    with pytest.raises(ShoalError) as caught:
        find_builder(name)
    assert what in str(caught.value)
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("def biuld(): ...", "has no function 'build'", "did you mean biuld?"),
        ("x = 1", "has no function 'build'", "def build(): ... in that file"),
        ("build = 3", "has no function 'build'", "def build()"),
        ("def build(): return 3", "returned int, not an nn.Module", "return the model"),
        ("def build(depth=1): ...", "unexpected keyword argument 'width'", "keys that it takes: depth"),
        ("def build(): ...", "unexpected keyword argument 'width'", "it takes no argument"),
        ("def build(:", "SyntaxError", "must run without an error"),
        ("y = 1\nint('one')", "ValueError: invalid literal", "must run without an error"),
    ],
)
def test_files_that_are_refused(write: Write, text: str, what: str, fix: str) -> None:
    path = write(text)
    keys = {} if "returned" in what else {"width": 1}
    with pytest.raises(ShoalError) as caught:
        build_model(ModelSection.model_validate({"name": f"{path}:build", **keys}))
    assert what in str(caught.value)
    assert fix in str(caught.value)


def test_the_line_that_raised_is_named(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("y = 1\nint('one')\n")
    monkeypatch.chdir(tmp_path)
    with rejects("M002", "line 2", "'one'"):
        find_builder("own_model.py:build")
