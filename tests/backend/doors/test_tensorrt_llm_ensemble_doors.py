"""TensorRT-LLM's preprocessing and postprocessing models, and the text model of its v0.5."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import ERROR_NAMES, only, running
from tests.backend.doors.tokenizers_at_hand import byte_level
from tests.fake_engine import LIMITS, FakeEngine, scripted
from tridecode.backend.doors import tensorrt_llm_postprocessing, tensorrt_llm_preprocessing, text_v05
from tridecode.backend.doors.contracts.tensorrt_llm_tokens import TENSORRT_LLM_PREPROCESSING
from tridecode.backend.doors.contracts.tensorrt_llm_v05 import TENSORRT_LLM_V05

TOKENIZER = byte_level()
EOS = TOKENIZER.token_to_id("<|endoftext|>")
OUTPUTS = {output.name: f"TYPE_{output.dtype}" for output in TENSORRT_LLM_PREPROCESSING.outputs}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    (root / "tokenizer").mkdir()
    TOKENIZER.save(str(root / "tokenizer" / "tokenizer.json"))
    (root / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return root


def load(module, name: str, outputs: dict, repository):
    config = fake_triton.model_config(name, {}, outputs, {"tokenizer_dir": "tokenizer"})
    door = module.TritonPythonModel()
    door.initialize(fake_triton.initialize_arguments(config, str(repository)))
    return door


@pytest.fixture(scope="module")
def pre(repository):
    return load(tensorrt_llm_preprocessing, "preprocessing", OUTPUTS, repository)


@pytest.fixture(scope="module")
def post(repository):
    return load(tensorrt_llm_postprocessing, "postprocessing", {"OUTPUT": "TYPE_STRING"}, repository)


def strings(rows: list[list]) -> np.ndarray:
    array = np.empty((len(rows), len(rows[0])), object)
    for i, row in enumerate(rows):
        array[i] = [text.encode() if isinstance(text, str) else text for text in row]
    return array


def run(door, arrays) -> dict[str, np.ndarray]:
    (response,) = door.execute([fake_triton.InferenceRequest(arrays)])
    assert not response.has_error(), response.error()
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def refused(door, arrays) -> tuple[str, str]:
    (response,) = door.execute([fake_triton.InferenceRequest(arrays)])
    return ERROR_NAMES[response.error().code()], response.error().message()


def query(*texts: str, **others) -> dict[str, np.ndarray]:
    rows = len(texts)
    arrays = {"QUERY": strings([[text] for text in texts])}
    return {**arrays, "REQUEST_OUTPUT_LEN": np.full((rows, 1), 5, np.int32), **others}


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def test_texts_become_rows_of_ids_with_the_ends_that_the_token_model_needs(pre):
    out = run(pre, query("Hello world", "fox"))
    ids = [ids_of("Hello world"), ids_of("fox")]
    width = max(map(len, ids))
    assert out["INPUT_ID"].tolist() == [row + [EOS] * (width - len(row)) for row in ids]
    assert out["REQUEST_INPUT_LEN"].tolist() == [[len(row)] for row in ids]
    assert out["REQUEST_OUTPUT_LEN"].tolist() == [[5], [5]]
    assert out["OUT_END_ID"].tolist() == out["OUT_PAD_ID"].tolist() == [[EOS], [EOS]]
    assert (out["DECODER_INPUT_ID"].tolist(), out["REQUEST_DECODER_INPUT_LEN"].tolist()) == (
        [[EOS], [EOS]],
        [[1], [1]],
    )
    assert out["EMBEDDING_BIAS"].shape == (2, 0)
    assert {out[name].dtype.type for name in out if name != "EMBEDDING_BIAS"} == {np.int32}


def test_a_requests_own_end_and_pad_ids_pass_through(pre):
    column = np.array([[7], [8]], np.int32)
    out = run(pre, query("Hello world Hello", "fox", END_ID=column, PAD_ID=column + 1))
    assert (out["OUT_END_ID"].tolist(), out["OUT_PAD_ID"].tolist()) == ([[7], [8]], [[8], [9]])
    assert out["INPUT_ID"][1, -1] == 9


def test_words_are_elements_and_not_csv(pre):
    out = run(pre, query("a", "b", STOP_WORDS_DICT=strings([["Hello, you", "fox"], ["", "dog"]])))
    first, second = ids_of("Hello, you") + ids_of("fox"), ids_of("dog")
    rows = out["STOP_WORDS_IDS"]
    assert rows[0, 0].tolist() == first
    assert rows[0, 1].tolist()[:2] == [len(ids_of("Hello, you")), len(first)]
    assert rows[1, 0].tolist()[: len(second)] == second and rows[1, 1].tolist()[:2] == [len(second), -1]
    empty = run(pre, query("a", BAD_WORDS_DICT=strings([[""]])))
    assert empty["BAD_WORDS_IDS"].tolist() == empty["STOP_WORDS_IDS"].tolist() == [[[0], [-1]]]


def test_each_token_of_a_word_gets_its_weight(pre):
    """As _get_embedding_bias of TensorRT-LLM's preprocessing adds them up, for every id of the tokenizer."""
    words = strings([[" fox", "stop", "", " fox"], ["a", "", "", ""]])
    weights = np.array([[1.5, -2.0, 7.0, 0.25], [-1e9, 0.0, 0.0, 3.0]], np.float32)
    sent = query("Hello", "a", EMBEDDING_BIAS_WORDS=words, EMBEDDING_BIAS_WEIGHTS=weights)
    bias = run(pre, sent)["EMBEDDING_BIAS"]
    wanted = np.zeros((2, TOKENIZER.get_vocab_size()), np.float32)
    for row in range(2):
        for word, weight in zip(words[row], weights[row]):
            for token in ids_of(word.decode()):
                wanted[row, token] += weight
    assert len(ids_of("stop")) > 1, "the test needs a word of several tokens"
    assert bias.dtype == np.float32 and np.array_equal(bias, wanted)
    without = query(
        "a", EMBEDDING_BIAS_WORDS=strings([[""]]), EMBEDDING_BIAS_WEIGHTS=np.zeros((1, 1), np.float32)
    )
    assert run(pre, without)["EMBEDDING_BIAS"].shape == (1, 0)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"DECODER_QUERY": strings([["x"]])}, "DECODER_QUERY has a text"),
        (
            {"EMBEDDING_BIAS_WEIGHTS": np.ones((1, 1), np.float32)},
            "EMBEDDING_BIAS_WEIGHTS was sent without EMBEDDING_BIAS_WORDS",
        ),
        ({"QUERY": strings([["a", "b"]])}, "QUERY has shape [1, 2]; wanted [B, 1]"),
        ({"QUERY": strings([[b"\xff"]])}, "QUERY of row 0 is not valid UTF-8"),
        (
            {"END_ID": np.array([[2**64 - 1]], np.uint64)},
            "END_ID is 18446744073709551615; wanted a whole number",
        ),
        ({"END_ID": np.array([[2**31]], np.int64)}, "END_ID is 2147483648; wanted a whole number"),
        ({"PAD_ID": np.array([[np.nan]], np.float32)}, "PAD_ID has the type FP32; wanted INT32"),
        ({"STOP_WORDS_DICT": strings([["a"]] * 3)}, "STOP_WORDS_DICT has shape [3, 1]; wanted [1, n]"),
        ({"STOP_WORDS_DICT": strings([["a"] * 100_000])}, "STOP_WORDS_DICT has 100,000 words"),
    ],
)
def test_preprocessing_refuses_by_name(pre, changes, complaint):
    assert complaint in refused(pre, {**query("a"), **changes})[1]


def test_ids_up_to_the_length_become_text(post):
    rows = [ids_of("Hello world"), ids_of("fox")]
    width = max(map(len, rows)) + 2
    tokens = np.array([[row + [3] * (width - len(row))] for row in rows], np.int32)
    lengths = np.array([[len(row)] for row in rows], np.int32)
    out = run(post, {"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": lengths})
    assert out["OUTPUT"].tolist() == [b"Hello world", b"fox"]
    assert "SEQUENCE_LENGTH is missing" in refused(post, {"TOKENS_BATCH": tokens})[1]
    wrong = {"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": lengths - 100}
    assert "SEQUENCE_LENGTH of row 0 is" in refused(post, wrong)[1]


def test_the_text_model_of_v05_reads_uint32_and_its_old_names(repository):
    inputs = {field.name: f"TYPE_{field.dtype}" for field in TENSORRT_LLM_V05.inputs}
    outputs = {output.name: f"TYPE_{output.dtype}" for output in TENSORRT_LLM_V05.outputs}
    config = fake_triton.model_config("ensemble", inputs, outputs, {"tokenizer_dir": "tokenizer"}, False, 64)
    limits = msgspec.structs.replace(LIMITS, vocab_size=600, end_id=EOS, start_id=EOS)
    engine = FakeEngine(limits=limits, next_token=scripted([*ids_of(" world"), EOS]))
    arrays = {name: np.array([[value]], np.uint32) for name, value in (
        ("max_tokens", 20), ("top_k", 4), ("end_id", EOS), ("pad_id", EOS), ("min_length", 2),
        ("beam_width", 1),
    )}  # fmt: skip
    arrays |= {name: strings([[""]]) for name in ("bad_words", "stop_words")}
    arrays |= {"text_input": strings([["Hello"]]), "random_seed": np.array([[7]], np.uint64)}
    with running(text_v05.TritonPythonModel, config, engine, repository) as door:
        out = only(fake_triton.ask(door, fake_triton.InferenceRequest(arrays)))
        (submit,) = door.test_engine.submits
    assert out["text_output"].tolist() == [b"Hello world"]
    params = submit.sequences[0].params
    assert (params.max_tokens, params.top_k, params.min_tokens, params.seed) == (20, 4, 2, 7)
