"""schemathesis over the routes of files and batches in the service's document, as test_openapi_document.py
does it for the others."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import schemathesis

from tests.backend.front.batches.clients import line, upload, wait
from tests.backend.front.fronts import Front
from tests.backend.front.test_openapi_document import CHECKS, SETTINGS
from tridecode.backend.front.routes.openapi import openapi

KNOWN = openapi()["paths"]
OPERATIONS = [
    (path, method)
    for path, methods in openapi(True)["paths"].items()
    if path not in KNOWN
    for method in methods
]
ALLOWED, FORBIDDEN = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
CASES = [(*one, ALLOWED) for one in OPERATIONS]
CASES += [(path, "post", FORBIDDEN) for path in ("/v1/files", "/v1/batches")]


@pytest.fixture(scope="module")
def document(front: Front) -> Any:
    return schemathesis.openapi.from_url(f"{front.url}/openapi.json")


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_answers_match_the_document(document: Any, front: Front, path: str, method: str, mode: Any) -> None:
    """Half of the ids are those of a file and of a batch that exist."""
    made = front.openai.batches.create(
        input_file_id=upload(front, [line("a")]), endpoint="/v1/completions", completion_window="24h"
    )
    wait(front, made.id)
    turns = right = 0

    @SETTINGS
    @hypothesis.given(case=document[path][method.upper()].as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        nonlocal turns, right
        turns += 1
        if mode is ALLOWED:
            if turns % 2 and case.path_parameters:
                known = {"file_id": made.input_file_id, "batch_id": made.id}
                case.path_parameters.update({k: known[k] for k in case.path_parameters})
            if path == "/v1/batches" and method == "post":
                case.body.update(input_file_id=made.input_file_id, endpoint="/v1/completions")
                case.body.update(completion_window="1h", metadata=None)
            (case.query or {}).pop("after", None)
        response = case.call(timeout=60)
        right += response.status_code == 200
        case.validate_response(response, checks=CHECKS)

    send()
    if mode is ALLOWED and not path.endswith("cancel"):
        assert right >= 1  # the batch has ended: cancel answers 409
