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


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()
