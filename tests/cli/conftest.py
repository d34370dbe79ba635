"""The process in whose forks the tests of this folder run their commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.host import Host


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()
