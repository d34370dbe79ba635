"""The pool of workers that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.pool import Pool


def pytest_collection_finish(session: pytest.Session) -> None:
    if (
        any("pool" in getattr(item, "fixturenames", ()) for item in session.items)
        and not session.config.option.collectonly
    ):
        Pool.warm_up()  # torch takes seconds to load; meanwhile other tests run


POOL = pytest.StashKey[Pool]()


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[Pool]:
    pytestconfig.stash[POOL] = pool = Pool()
    yield pool
    pool.close()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End idle workers after the last test of this folder: gloo's threads take 2 % of a core in each of dozens."""
    is_last = nextitem is None or nextitem.path.parent != item.path.parent
    if is_last and POOL in item.config.stash:
        item.config.stash[POOL].close()
