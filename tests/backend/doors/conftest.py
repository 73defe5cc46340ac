"""Installs the fake of Triton's utilities before a door is imported."""

from __future__ import annotations

import pytest

from tests import fake_triton

fake_triton.install()


@pytest.fixture(autouse=True)
def nothing_crashes_the_server():
    yield
    crashes, fake_triton.ResponseSender.crashes = fake_triton.ResponseSender.crashes, []
    assert not crashes
