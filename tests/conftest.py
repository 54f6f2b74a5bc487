"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The worker processes of this session; see :mod:`tests.pool`."""
    pool = Pool()
    yield pool
    pool.close()
