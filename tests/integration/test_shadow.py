"""Shadow runs in the real tritonserver: the metrics page, and an engine that dies during a run."""

from __future__ import annotations

import re
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import hf_greedy
from tests.backend.engine.test_shadow import compared, logits_of
from tests.checkpoints import save, tiny_llama
from tests.integration.clients import infer, standard_inputs
from tests.quantized import rounded_model
from tests.reliability.service import Service
from tests.waiting import wait_until
from tridecode.backend.weights.quantization import Quantization
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.converters.parity.grades import Floor
from tridecode.tools.build_repo.build import build_repo

pytestmark = [pytest.mark.server, pytest.mark.slow]

INT8 = Quantization("int8")
PROMPTS = [[5, 9, 11, 3], [7], [4, 4, 8, 12, 9, 30, 21], [13, 2]]
COUNT = 12
LONG = 900  # tokens of the answer whose shadow run is in progress when the engine is killed
#: a slice has one token, so that a shadow run of LONG tokens takes a while
SETTINGS = {
    "cache_bytes": "67108864", "num_threads": "1", "device": "cpu", "shadow_share": "1",
    "shadow_slice_tokens": "1", "shadow_weights": "../../dense",
}  # fmt: skip


@dataclass
class Shadowed:
    service: Service
    source: torch.nn.Module
    rounded: torch.nn.Module

    def ask(self, prompt: list[int], count: int) -> list[int]:
        answer = infer("grpc", self.service.grpc, "fastertransformer", standard_inputs([prompt], [count]))
        return answer.as_numpy("output_ids")[0, 0, len(prompt) :].tolist()

    def keep_busy(self) -> None:
        """Wait until shadow runs are in progress; they take longer than the page's interval of a second."""
        for first in (3, 4, 5, 6):
            self.ask([first], LONG)
        wait_until(lambda: self.metrics()["queued"] >= 1, 60, "a shadow run that is under way")

    def metrics(self) -> dict[str, float]:
        """Return the page's values of shadow runs by name and labels, without the engine's label."""
        url = f"http://127.0.0.1:{self.service.server.metrics_port}/metrics"
        page, found = urllib.request.urlopen(url, timeout=5).read().decode(), {}
        pattern = r"tridecode_engine_shadow_(\w+)\{(.*)\} (\S+)"
        for name, labels, value in re.findall(pattern, page):
            others = [label for label in labels.split(",") if not label.startswith("engine=")]
            found[",".join([name.removesuffix("_total"), *others])] = float(value)
        return found


@pytest.fixture(scope="module")
def shadowed(tmp_path_factory) -> Iterator[Shadowed]:
    folder: Path = tmp_path_factory.mktemp("shadow")
    model = tiny_llama(max_position_embeddings=1024)
    source = open_checkpoint(save(model, folder / "hf"))
    plan_conversion(source, "fp32").write(folder / "dense")
    repository = build_repo(
        str(folder / "hf"),
        folder / "repo",
        dtype="fp32",
        quantization=INT8,
        quantization_floor=Floor(100.0, 0.0),
        engine_settings=SETTINGS,
    )
    service = Service(repository)
    try:
        yield Shadowed(
            service, model, rounded_model(model, plan_conversion(source, "fp32", None, INT8), True)
        )
    finally:
        service.close()


def test_the_metrics_page_has_the_divergence_and_agreement_of_transformers(shadowed: Shadowed) -> None:
    kl, agreeing = [], 0
    for prompt in PROMPTS:
        answer = shadowed.ask(prompt, COUNT)
        assert answer == hf_greedy(shadowed.rounded, prompt, COUNT)[0]
        tokens = (prompt + answer)[:-1]
        both = logits_of(shadowed.source, tokens), logits_of(shadowed.rounded, tokens)
        one = compared(*both, COUNT)
        kl, agreeing = [*kl, one[0] / COUNT], agreeing + one[1]
    wait_until(lambda: shadowed.metrics().get("kl_count") == len(PROMPTS), 20, "the shadow runs")
    found = shadowed.metrics()
    assert (found["tokens"], found["tokens_agreeing"]) == (COUNT * len(PROMPTS), agreeing)
    np.testing.assert_allclose(found["kl_sum"], sum(kl), rtol=2e-3)
    np.testing.assert_allclose(found["agreement_sum"], agreeing / COUNT)
    for bound in (0.001, 0.01, 0.1, 1):
        assert found[f'kl_bucket,le="{bound:g}"'] == sum(value <= bound for value in kl)
    assert found['kl_bucket,le="+Inf"'] == found["ended"] == len(PROMPTS)
    assert found['skipped,reason="beams"'] == found["failed"] == found["dropped"] == found["queued"] == 0


def test_an_engine_killed_during_a_shadow_run_is_rebuilt(shadowed: Shadowed) -> None:
    shadowed.keep_busy()
    shadowed.service.roles()["rank0"].send_signal(signal.SIGKILL)
    wait_until(lambda: "epoch 2" in shadowed.service.log(), 30, "the next engine")
    wanted = hf_greedy(shadowed.rounded, PROMPTS[0], COUNT)[0]

    def answers() -> bool:
        try:
            return shadowed.ask(PROMPTS[0], COUNT) == wanted
        except Exception:
            return False

    wait_until(answers, 30, "answers of the next engine")
    wait_until(
        lambda: shadowed.metrics()["kl_count"] >= 1 and shadowed.metrics()["queued"] == 0, 20, "its runs"
    )
    assert shadowed.metrics()["failed"] == 0


def test_nothing_is_left_after_a_stop_during_a_shadow_run(shadowed: Shadowed) -> None:
    shadowed.keep_busy()
    assert shadowed.service.stop() == ""
