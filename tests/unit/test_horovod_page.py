"""The script of docs/horovod.md, before and after: under Horovod's name by `install()`, and with the new import."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ShoalError
from shoal.horovod import install
from tests.rejects import rejects

PAGE = (Path(__file__).parents[2] / "docs" / "horovod.md").read_text()
[AFTER] = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
BEFORE = AFTER.replace("import shoal.horovod as hvd", "import horovod.torch as hvd")


@pytest.fixture
def without_horovod() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]


def losses_of(script: str) -> list[float]:
    names: dict[str, Any] = {}
    exec(compile(script, "horovod.md", "exec"), names)
    found: list[float] = names["losses"]
    return found


@pytest.mark.usefixtures("without_horovod")
def test_the_script_computes_the_same_before_and_after() -> None:
    assert BEFORE != AFTER
    with pytest.raises(ModuleNotFoundError):
        losses_of(BEFORE)
    install()
    install()  # a second call does nothing
    after = losses_of(AFTER)
    assert losses_of(BEFORE) == after
    assert after[-1] < after[0]


@pytest.mark.usefixtures("without_horovod")
def test_the_parts_that_scripts_import_are_there() -> None:
    install()
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt  # type: ignore[import-not-found]
    from horovod.torch.compression import Compression  # type: ignore[import-not-found]
    from horovod.torch.elastic import ElasticSampler, TorchState, run  # type: ignore[import-not-found]
    from horovod.torch.mpi_ops import rank, synchronize  # type: ignore[import-not-found]

    assert all((HorovodInternalError, HostsUpdatedInterrupt, Compression, ElasticSampler, TorchState, run, synchronize))
    with rejects("H001"):
        rank()


@pytest.mark.usefixtures("without_horovod")
def test_install_does_not_hide_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ShoalError, match="H015"):
        install()


@pytest.mark.usefixtures("without_horovod")
def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "horovod").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError):
        import horovod.torch  # the folder stays in sys.modules  # noqa: F401
    assert "horovod" in sys.modules
    install()
    assert sys.modules["horovod"].__shoal__  # type: ignore[attr-defined]
