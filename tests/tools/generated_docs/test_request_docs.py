"""docs/reference/requests.md has the contracts' tables, with every tensor of the contracts' sources."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tridecode.tools.generated_docs.requests import PAGE, main, updated

CONTRACTS = json.loads(
    (Path(__file__).parents[2] / "model_repo_templates" / "client_contracts.json").read_text()
)
#: table of the page -> contract that its tensors come from
SOURCES = {
    "text": "trtllm_inflight_batcher_llm/ensemble",
    "fastertransformer": "fastertransformer/gpt/fastertransformer",
    "ensemble": "fastertransformer/gpt/ensemble",
    "preprocessing": "fastertransformer/gpt/preprocessing",
    "postprocessing": "fastertransformer/gpt/postprocessing",
    "token_model": "trtllm_inflight_batcher_llm/tensorrt_llm",
    "tensorrt_llm_preprocessing": "trtllm_inflight_batcher_llm/preprocessing",
    "text_v05": "trtllm_ensemble_v0.5.0",
    "vllm": "vllm_backend",
    "llmapi": "trtllm_llmapi/tensorrt_llm",
}


def test_the_tables_of_the_page_are_those_of_the_contracts():
    assert main([]) == 0, "run python -m tridecode.tools.generated_docs.requests --write"


def test_an_edited_table_and_an_unknown_one_are_noticed():
    page = PAGE.read_text()
    assert updated(page.replace("| `text_input` | STRING |", "| `text_input` | INT32 |")) == page
    with pytest.raises(KeyError, match="no such table"):
        updated("<!-- table: no such table -->\n<!-- end -->")


@pytest.mark.parametrize("name", SOURCES)
def test_every_tensor_of_a_contract_is_documented_with_its_type(name):
    blocks = dict(re.findall(r"<!-- table: (.+?) -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL))
    inputs = blocks[f"{name} inputs"]
    for tensor, dtype, _, _ in CONTRACTS[SOURCES[name]]["input"]:
        documented = re.search(rf"^\| `{tensor}`.*? \| {dtype} \|", inputs, re.MULTILINE)
        assert documented or f"`{tensor}`" in blocks[f"{name} refused"], tensor
    for tensor, dtype, _, _ in CONTRACTS[SOURCES[name]]["output"]:
        outputs = blocks[f"{name} outputs"]
        sent = re.search(rf"^\| `{tensor}` \| {dtype} \| \S", outputs, re.MULTILINE)
        assert sent or re.search(rf"never sent:.*`{tensor}`", outputs, re.DOTALL), tensor
