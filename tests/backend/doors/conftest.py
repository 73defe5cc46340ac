"""Puts the stand-in for Triton's utilities in place before a door is imported."""

from __future__ import annotations

from tests import fake_triton

fake_triton.install()
