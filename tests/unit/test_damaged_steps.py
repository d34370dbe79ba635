"""Something that is no step has the name of one: it is moved aside, listed, and never removed."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.checkpoint.storage.locate import listing
from shoal.checkpoint.storage.store import Store
from tests.cover import wide
from tests.unit.test_checkpoint_files import small
from tests.warm import warm_python


def test_each_damaged_folder_gets_a_name_of_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number in (1, 2, 3):
        (tmp_path / "step-00000007").mkdir()
        (tmp_path / "step-00000007" / "file").write_text(f"{number}")
        assert store.damaged() == ["step-00000007"]
        small(store, 7)
        assert store.damaged() == []
        assert store.steps() == [7]
        assert (tmp_path / f"step-00000007.damaged-{number}" / "file").read_text() == f"{number}"
        told = store.take_notes()
        assert len(told) == 1
        assert f"renamed to step-00000007.damaged-{number}" in told[0]
        assert store.take_notes() == []
        (tmp_path / "step-00000007").rename(tmp_path / f"good-{number}")
    small(store, 8)
    store.retain(1)
    store.archive(after=0)
    names = [found.path.name for found in listing(tmp_path) if "damaged" in found.trouble]
    assert names == [f"step-00000007.damaged-{number}" for number in (1, 2, 3)]


def test_a_file_or_a_link_is_listed_as_damaged(tmp_path: Path) -> None:
    small(Store(tmp_path), 1)
    (tmp_path / "step-00000002").write_text("a file")
    (tmp_path / "step-00000003").symlink_to("nowhere")
    assert [found.trouble for found in listing(tmp_path)] == ["", *["damaged: it has no manifest.json"] * 2]


def test_a_loop_of_ones_own_is_warned(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "file").write_text("of a person")
    model = nn.Linear(4, 3)
    with shoal.Run() as run:
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.step((torch.randn(8, 4), torch.randint(0, 3, (8,))))
        with pytest.warns(UserWarning, match=r"renamed to step-00000001\.damaged-1"):
            run.save(tmp_path)
        assert run.load(tmp_path) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(("mode", "code"), [(0o555, 2), wide(0o333, 0)])
def test_a_directory_of_someone_else(tmp_path: Path, mode: int, code: int) -> None:
    """One that cannot be written to is rejected; one that can be written to and not read is used."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    folder.chmod(mode)
    words = f"""
import sys
from pathlib import Path
from shoal.config.recipe import Recipe
from shoal.errors import ShoalError
from shoal.observe.run_directory import RunDirectory
import os
os.setuid(65534)
recipe = Recipe.model_validate({{"run": {{"dir": {str(folder / "run")!r}}}}})
try:
    RunDirectory.claim(recipe).begin(recipe)
except ShoalError as error:
    print(error)
    sys.exit(error.exit_code)
"""
    for parent in (tmp_path, *tmp_path.parents):
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o755)
    ended = subprocess.run([warm_python(), "-c", words], capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert not code or f"the run directory '{folder}/run' cannot be written: Permission denied" in ended.stdout
