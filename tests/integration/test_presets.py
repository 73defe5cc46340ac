"""`build-repo --for`: the recorded requests of the clients of each server, against the real one."""

from __future__ import annotations

import pytest

from tests.checkpoints import save, tiny_gpt2
from tests.clients.replay import recorded, refusal
from tridecode.tools.build_repo import commands as repo_commands
from tridecode.tools.serve.server_process import running_server

pytestmark = [pytest.mark.server, pytest.mark.slow]

VOCABULARY = 30_000  # above the ids that the clients send
CLIENTS = {
    "fastertransformer": [
        ("FasterTransformer identity_test.py", "fastertransformer"),
        ("FasterTransformer end_to_end_test.py, preprocessing", "preprocessing"),
        ("FasterTransformer end_to_end_test.py, ensemble", "ensemble"),
        ("FasterTransformer issue_request.py, sample_request_stream.json", "fastertransformer_streaming"),
        ("genai-perf --backend tensorrtllm", "tensorrt_llm_bls_plain"),
    ],
    "trtllm": [
        ("TensorRT-LLM end_to_end_grpc_client.py --streaming", "ensemble"),
        ("TensorRT-LLM end_to_end_grpc_client.py --streaming", "tensorrt_llm_bls"),
        ("TensorRT-LLM inflight_batcher_llm_client.py", "tensorrt_llm"),
        ("TensorRT-LLM benchmark_core_model.py", "tensorrt_llm"),
        ("TensorRT-LLM end_to_end_test.py, preprocessing", "preprocessing"),
        ("genai-perf --backend tensorrtllm", "tensorrt_llm_bls_plain"),
    ],
    "vllm": [
        ("vLLM backend client.py", "vllm_model"),
        ("TensorRT-LLM end_to_end_grpc_client.py --streaming", "ensemble"),
        ("genai-perf --backend tensorrtllm", "tensorrt_llm_bls_plain"),
    ],
}


@pytest.mark.parametrize("clients", CLIENTS)
def test_the_clients_of_a_server_are_answered_by_a_repository_for_them(tmp_path, clients, capsys) -> None:
    source = save(tiny_gpt2(vocab_size=VOCABULARY, n_positions=1024), tmp_path / "hf")
    repo_commands.build_repo(str(source), tmp_path / "repo", for_clients=clients, dtype="fp32", parity=False)
    assert f"--for {clients}: --contract " in capsys.readouterr().out
    requests = recorded()
    with running_server(tmp_path / "repo") as server:
        refused = {key: refusal(server.grpc_url, requests[key]) for key in CLIENTS[clients]}
    assert refused == dict.fromkeys(CLIENTS[clients], "")
