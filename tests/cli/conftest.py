"""The process in whose forks the tests of this folder run their commands."""

from __future__ import annotations

import pytest

from tests.cli.host import Host

HOST = pytest.StashKey[Host]()


def pytest_collection_finish(session: pytest.Session) -> None:
    is_asked_for = any("host" in getattr(item, "fixturenames", ()) for item in session.items)
    if is_asked_for and not session.config.option.collectonly:
        session.config.stash[HOST] = Host()  # it loads torch while other tests run


def pytest_sessionfinish(session: pytest.Session) -> None:
    if HOST in session.config.stash:
        session.config.stash[HOST].close()


@pytest.fixture(scope="session")
def host(pytestconfig: pytest.Config) -> Host:
    return pytestconfig.stash[HOST]
