from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.envs.openreward.worlds import Served, served


@pytest.fixture(scope="module")
def worlds() -> Iterator[Served]:
    with served() as running:
        yield running
        assert running.sessions == 0, "a session was left on the server"
