"""The stand-in for a model that was not built."""

from __future__ import annotations

import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import refusal
from tridecode.backend.doors.absent import TritonPythonModel


@pytest.mark.parametrize("decoupled", [False, True])
def test_every_request_gets_the_option_that_makes_the_model(decoupled):
    config = fake_triton.model_config(
        "tensorrt_llm", {}, {}, {"made_by": "--contract tensorrt_llm_tokens"}, decoupled
    )
    door = TritonPythonModel()
    door.initialize(fake_triton.initialize_arguments(config, "/nowhere"))
    requests = [fake_triton.InferenceRequest({"input_ids": np.zeros((1, 1), np.int32)}) for _ in range(2)]
    door.execute(requests)
    for request in requests:
        code, text = refusal(request.sender.sent)
        assert code == "UNSUPPORTED"
        assert text == (
            "model tensorrt_llm is not part of this repository; tridecode build-repo --contract "
            "tensorrt_llm_tokens makes it"
        )
