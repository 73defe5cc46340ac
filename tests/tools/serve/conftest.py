from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tools.serve.fakes import FakeTriton


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    fake = FakeTriton()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()
