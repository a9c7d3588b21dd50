"""Caches that several files of tests use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from relaygr_stream.cache.prefix_cache import PrefixCache
from tests.unit.cache.worlds import Flaky, make


@pytest.fixture
def small() -> Iterator[tuple[PrefixCache, Flaky]]:
    """Two entries of the longest sequence fit beside the scratch region."""
    copier = Flaky()
    cache = make(9, 6, copier)
    yield cache, copier
    cache.check_integrity()
    cache.close()
