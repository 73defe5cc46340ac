"""The constraints with which `make front-pythons` installs the service's oldest dependencies."""

from __future__ import annotations

import importlib.metadata

import pytest

from tests.clients.front_pythons import oldest


def test_each_dependency_is_held_at_its_lower_bound() -> None:
    requirements = [
        "numpy>=1.24",
        'uvicorn<1,>=0.30; extra == "front"',
        'tritonclient[grpc]<3,>=2.50; extra == "front"',
        'torch>=2.6; extra == "engine"',
    ]
    assert oldest(requirements) == ["numpy==1.24", "uvicorn==0.30", "tritonclient==2.50"]
    with pytest.raises(ValueError, match="rich has no lower bound"):
        oldest(["rich"])


def test_every_dependency_of_the_service_has_a_lower_bound() -> None:
    found = {line.partition("==")[0] for line in oldest(importlib.metadata.requires("tridecode") or [])}
    assert {"numpy", "msgspec", "tokenizers", "uvicorn", "starlette", "uvloop", "httptools"} <= found
