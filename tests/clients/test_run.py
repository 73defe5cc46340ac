"""`make clients` end to end with programs that every machine has, on a tiny checkpoint."""

from __future__ import annotations

import shutil

import pytest

from tests.checkpoints import TINY_VOCAB, save, tiny_gpt2
from tests.clients import run
from tests.clients.program import Program
from tests.clients.programs import HTTP

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.nightly]

REFUSED = Program("vLLM", "its request", recorded=(("vLLM backend client.py", "vllm_model"),))
ENSEMBLE = (("TensorRT-LLM end_to_end_grpc_client.py --streaming", "ensemble"),)
WITH_OPTION = Program("owner", "a stream", recorded=ENSEMBLE, options=("--ensemble-owner", "tensorrt_llm"))
ABSENT = Program("absent", "a way", ("{python}", "-c", "0"), environment="absent")


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_a_run_says_of_each_program_whether_it_works_and_why_not(tmp_path, monkeypatch) -> None:
    nothing = run.environments.Environment("x", ("x @ file:///does/not/exist.whl",), 60.0)
    monkeypatch.setitem(run.environments.ENVIRONMENTS, "absent", nothing)
    monkeypatch.setattr(run.environments, "perf_analyzer", lambda cache: (None, "not fetched in a test"))
    model = save(tiny_gpt2(vocab_size=TINY_VOCAB, n_positions=256), tmp_path / "hf")
    setting = run.Setting(tmp_path / "cache", tmp_path / "sources", str(model))
    rows = run.run_all([HTTP[0], REFUSED, WITH_OPTION, ABSENT], setting)
    verdicts = [row.verdict for row in rows]
    assert verdicts[0] == "works"
    assert verdicts[1].startswith("does not: ") and "vllm_model" in verdicts[1]
    assert verdicts[2] == "works with `--ensemble-owner tensorrt_llm`"
    assert verdicts[3].startswith("does not: cannot be installed: ") and "exist.whl" in verdicts[3]
    assert rows[1].how == "its request, its request replayed"
