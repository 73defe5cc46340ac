"""FasterTransformer's preprocessing and postprocessing models."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests import fake_triton
from tests.backend.doors.running import ERROR_NAMES
from tests.backend.doors.tokenizers_at_hand import byte_level
from tridecode.backend.doors import postprocessing, preprocessing
from tridecode.backend.doors.requests.word_lists import read_word_list

PRE_OUTPUTS = {
    "INPUT_ID": "TYPE_UINT32",
    "REQUEST_INPUT_LEN": "TYPE_UINT32",
    "BAD_WORDS_IDS": "TYPE_INT32",
    "STOP_WORDS_IDS": "TYPE_INT32",
    "REQUEST_OUTPUT_LEN": "TYPE_UINT32",
}
TOKENIZER = byte_level()
EOS = TOKENIZER.token_to_id("<|endoftext|>")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    (root / "tokenizer").mkdir()
    limited = type(TOKENIZER).from_str(TOKENIZER.to_str())
    limited.enable_truncation(3)  # as in some published tokenizer files
    limited.enable_padding(length=8)
    limited.save(str(root / "tokenizer" / "tokenizer.json"))
    (root / "tokenizer" / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|endoftext|>"}})
    )
    return root


def load(module, name: str, outputs: dict, repository, **parameters):
    config = fake_triton.model_config(name, {}, outputs, {"tokenizer_dir": "tokenizer", **parameters})
    door = module.TritonPythonModel()
    door.initialize(fake_triton.initialize_arguments(config, str(repository)))
    return door


@pytest.fixture(scope="module")
def pre(repository):
    return load(preprocessing, "preprocessing", PRE_OUTPUTS, repository)


@pytest.fixture(scope="module")
def post(repository):
    return load(postprocessing, "postprocessing", {"OUTPUT": "TYPE_STRING"}, repository)


def column(values: list) -> np.ndarray:
    array = np.empty((len(values), 1), object)
    array[:, 0] = [value.encode() if isinstance(value, str) else value for value in values]
    return array


def run(door, arrays, **request) -> dict[str, np.ndarray]:
    (response,) = door.execute([fake_triton.InferenceRequest(arrays, **request)])
    assert not response.has_error(), response.error()
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def refused(door, arrays) -> tuple[str, str]:
    (response,) = door.execute([fake_triton.InferenceRequest(arrays)])
    return ERROR_NAMES[response.error().code()], response.error().message()


def query(texts: list, bad: list | None = None, stop: list | None = None) -> dict[str, np.ndarray]:
    arrays = {"QUERY": column(texts), "REQUEST_OUTPUT_LEN": np.full((len(texts), 1), 5, np.uint32)}
    if bad is not None:
        arrays["BAD_WORDS_DICT"] = column(bad)
    if stop is not None:
        arrays["STOP_WORDS_DICT"] = column(stop)
    return arrays


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def test_texts_become_rows_padded_with_the_end_id(pre):
    texts = ["the quick brown fox jumps", "東京", ""]
    out = run(pre, query(texts, ["", "", ""], ["", "", ""]))
    width = max(len(ids(text)) for text in texts)
    assert out["INPUT_ID"].dtype == np.uint32
    for row, text in zip(out["INPUT_ID"].tolist(), texts):
        assert row == ids(text) + [EOS] * (width - len(ids(text)))
    assert out["REQUEST_INPUT_LEN"].tolist() == [[len(ids(text))] for text in texts]
    assert out["REQUEST_INPUT_LEN"].dtype == out["REQUEST_OUTPUT_LEN"].dtype == np.uint32
    assert out["REQUEST_OUTPUT_LEN"].tolist() == [[5]] * 3


def test_word_lists_have_ids_and_ends_of_the_words(pre):
    bad = ["fox,brown fox", "", '"a, b"']
    out = run(pre, query(["x", "y", "z"], bad, ["", "", ""]))
    rows = [[ids("fox"), ids("brown fox")], [], [ids("a, b")]]
    width = max(sum(map(len, row)) for row in rows)
    assert out["BAD_WORDS_IDS"].shape == (3, 2, width) and out["BAD_WORDS_IDS"].dtype == np.int32
    for tensor, words in zip(out["BAD_WORDS_IDS"], rows):
        flat = [token for word in words for token in word]
        ends = [sum(map(len, words[: n + 1])) for n in range(len(words))]
        assert tensor[0].tolist() == flat + [0] * (width - len(flat))
        assert tensor[1].tolist() == ends + [-1] * (width - len(ends))
    assert out["STOP_WORDS_IDS"].tolist() == [[[0], [-1]]] * 3


def test_spaces_of_a_word_are_kept_and_empty_cells_are_dropped(pre):
    out = run(pre, query(["x"], ["Hawks, Hawks,,"], [""]))
    flat, ends = out["BAD_WORDS_IDS"][0].tolist()
    assert flat == ids("Hawks") + ids(" Hawks")
    assert [end for end in ends if end >= 0] == [len(ids("Hawks")), len(flat)]


def test_word_lists_may_be_left_out(pre):
    assert run(pre, query(["x"]))["BAD_WORDS_IDS"].tolist() == [[[0], [-1]]]


def test_what_is_encoded_can_be_read_back_by_the_engine_door(pre):
    out = run(pre, query(["x", "y"], ["fox,dog", ""], ["", "lazy"]))
    assert read_word_list(out["BAD_WORDS_IDS"], 2, "bad", 1000) == [[ids("fox"), ids("dog")], []]
    assert read_word_list(out["STOP_WORDS_IDS"], 2, "stop", 1000) == [[], [ids("lazy")]]


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (query(["x"], ["a\nb"]), "BAD_WORDS_DICT has 2 lines; wanted one line of words"),
        (query([b"\xff"]), "QUERY of row 0 is not valid UTF-8"),
        (query(["x"], stop=[b"\xff"]), "STOP_WORDS_DICT of row 0 is not valid UTF-8"),
        (query(["x", "y"], ["a"]), "BAD_WORDS_DICT has shape [1, 1]; wanted [2, 1], a text for"),
        ({"QUERY": column(["x"])}, "REQUEST_OUTPUT_LEN is missing"),
        ({**query(["x"]), "QUERY": np.empty((1, 0), object)}, "QUERY has shape [1, 0]"),
    ],
)
def test_a_bad_request_is_refused_by_name(pre, arrays, text):
    code, found = refused(pre, arrays)
    assert code == "INVALID_ARG" and text in found


def test_one_bad_request_does_not_hurt_its_neighbours(pre):
    requests = [fake_triton.InferenceRequest(query([text])) for text in ("a", b"\xff", "b")]
    assert [response.has_error() for response in pre.execute(requests)] == [False, True, False]


def tokens(rows: list[list[int]]) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([[row + [EOS] * (width - len(row))] for row in rows], np.uint32)


def test_rows_become_texts_without_padding_in_one_flat_array(post):
    texts = ["the quick 東京 fox 😀", "a", ""]
    arrays = {
        "TOKENS_BATCH": tokens([ids(text) for text in texts]),
        "RESPONSE_INPUT_LENGTHS": np.zeros((3, 1), np.int32),
    }
    out = run(post, arrays)
    assert out["OUTPUT"].shape == (3,)
    assert [text.decode() for text in out["OUTPUT"]] == texts


def test_ids_beyond_the_tokenizer_do_not_fail_the_request(post):
    row = [*ids("fox"), 50303, *ids(" dog")]
    assert run(post, {"TOKENS_BATCH": tokens([row])})["OUTPUT"].tolist() == [b"fox dog"]


def test_a_row_can_be_cut_by_its_sequence_length(post):
    arrays = {"TOKENS_BATCH": tokens([ids("fox") + ids(" dog")])}
    arrays["sequence_length"] = np.array([[len(ids("fox"))]], np.uint32)
    assert run(post, arrays)["OUTPUT"].tolist() == [b"fox"]


def test_special_tokens_inside_a_row_are_not_shown(post):
    row = [*ids("fox"), TOKENIZER.token_to_id("<pad>"), EOS, *ids(" dog")]
    assert run(post, {"TOKENS_BATCH": tokens([row])})["OUTPUT"].tolist() == [b"fox dog"]


def test_special_tokens_are_shown_with_skip_special_tokens_false(repository):
    door = load(
        postprocessing, "postprocessing", {"OUTPUT": "TYPE_STRING"}, repository, skip_special_tokens="false"
    )
    out = run(door, {"TOKENS_BATCH": tokens([ids("fox"), ids("fox") + [EOS]])})
    assert out["OUTPUT"].tolist() == [b"fox<|endoftext|>"] * 2


def test_rows_of_no_tokens_are_empty_texts(post):
    assert run(post, {"TOKENS_BATCH": np.zeros((2, 1, 0), np.uint32)})["OUTPUT"].tolist() == [b"", b""]
