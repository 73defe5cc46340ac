"""batch_invariant: log probs are bitwise equal alone, in a batch, and for any split of the prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.backend.engine.offline_models import offline_engine, prompts_of
from tests.backend.hf_models import bloom, gpt2, llama
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.configuration.model_config import ModelConfig
from tridecode.backend.engine.device.resolved_settings import resolve
from tridecode.backend.wire.messages import SamplingParams

LENGTHS = [1, 2, 9, 23, 30, 40, 17, 33, 5]
WANTED = SamplingParams(max_tokens=8, return_log_probs=True)


@pytest.mark.parametrize("make", [llama, gpt2, bloom], ids=["llama", "gpt2", "bloom"])
def test_log_probs_are_the_same_bits_alone_and_in_company(make) -> None:
    model = make()
    prompts = prompts_of(LENGTHS, model.config.vocab_size)
    settings = dict(keep_logits=False, batch_invariant=True, block_tokens=32)
    whole = offline_engine(model, max_step_tokens=64, **settings)
    alone = [whole.generate([prompt], WANTED)[0] for prompt in prompts]
    cut = offline_engine(model, max_step_tokens=16, **settings)
    together = cut.generate(prompts, WANTED)  # chunks of up to 16, four decode together
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert [one.log_probs for one in together] == [one.log_probs for one in alone]


def test_a_device_and_a_type_for_which_it_is_not_promised_are_refused(model_config: ModelConfig) -> None:
    wanted = EngineConfig(batch_invariant=True)
    assert resolve(wanted, model_config, torch.device("cpu")).batch_invariant
    with pytest.raises(ConfigError, match="data_type fp32 on cuda; wanted fp32 on a CPU"):
        resolve(wanted, model_config, torch.device("cuda"))
    with pytest.raises(ConfigError, match="block_tokens is 8 with batch_invariant; wanted a multiple of 32"):
        resolve(replace(wanted, block_tokens=8), model_config, torch.device("cpu"))
    with pytest.raises(ConfigError, match="data_type bf16 on cpu"):
        resolve(replace(wanted, data_type="bf16"), model_config, torch.device("cpu"))


@pytest.fixture()
def model_config() -> ModelConfig:
    return offline_engine(llama()).model_config


def test_the_idle_check_of_a_device_does_nothing_on_a_cpu() -> None:
    offline = offline_engine(llama(), keep_logits=False)
    offline.engine.check_device()
    assert np.isfinite(offline.generate([[5]], WANTED)[0].log_probs).all()
