"""The tokenizer that a door gets splits and adds what transformers' does."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from tests.checkpoints import TEXTS, save, tiny_gpt2, tiny_llama, tiny_tokenizer
from tridecode.backend.base.errors import CheckpointError
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.sources import Checkpoint
from tridecode.converters.tokenizers.files import PROBES, load_tokenizer, save_tokenizer
from tridecode.converters.tokenizers.vocabulary import vocabulary_size


@pytest.fixture
def gpt2(tmp_path):
    return save(tiny_gpt2(), tmp_path / "gpt2")


@pytest.fixture
def llama(tmp_path):
    return save(tiny_llama(), tmp_path / "llama")


def written(source, directory) -> Tokenizer:
    save_tokenizer(load_tokenizer(open_checkpoint(source)), source, directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_written_tokenizer_is_transformers(family, request, tmp_path):
    source = request.getfixturevalue(family)
    tokenizer, theirs = written(source, tmp_path / "t"), AutoTokenizer.from_pretrained(source)
    for text in [*PROBES, *TEXTS]:
        assert tokenizer.encode(text).ids == theirs(text).input_ids
        ids = theirs(text, add_special_tokens=False).input_ids
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids
        assert tokenizer.decode(ids) == text


def test_a_bos_is_added_exactly_where_the_model_adds_one(gpt2, llama, tmp_path):
    assert written(llama, tmp_path / "a").encode("The").ids[0] == 1
    assert 1 not in written(gpt2, tmp_path / "b").encode("The").ids


def test_truncation_and_padding_of_the_source_are_not_passed_on(gpt2, tmp_path):
    path = gpt2 / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    assert len(written(gpt2, tmp_path / "t").encode("one two three four five six seven").ids) > 9


def test_companion_files_are_copied_as_they_are(gpt2, tmp_path):
    (gpt2 / "chat_template.jinja").write_text("{{ messages }}")
    (gpt2 / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    written(gpt2, tmp_path / "t")
    for name in ("chat_template.jinja", "special_tokens_map.json"):
        assert (tmp_path / "t" / name).read_bytes() == (gpt2 / name).read_bytes()


def test_the_written_tokenizer_can_be_read_by_transformers_4(gpt2, tmp_path):
    path = gpt2 / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    assert settings["tokenizer_class"] == "TokenizersBackend"  # transformers 5
    path.write_text(json.dumps({**settings, "extra_special_tokens": ["<|x|>"], "model_max_length": 77}))
    written(gpt2, tmp_path / "t")
    found = json.loads((tmp_path / "t" / "tokenizer_config.json").read_text())
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast" and "backend" not in found
    assert found["additional_special_tokens"] == ["<|x|>"] and "extra_special_tokens" not in found
    assert (found["model_max_length"], found["eos_token"]) == (77, "</s>")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "t")
    assert theirs("The harbour").input_ids == AutoTokenizer.from_pretrained(gpt2)("The harbour").input_ids


def test_a_class_that_transformers_4_knows_is_kept(gpt2, tmp_path):
    path = gpt2 / "tokenizer_config.json"
    path.write_text(json.dumps({"tokenizer_class": "GPT2TokenizerFast", "eos_token": "</s>"}))
    written(gpt2, tmp_path / "t")
    assert (tmp_path / "t" / "tokenizer_config.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json"])
def test_a_companion_file_is_limited_before_it_is_read(gpt2, name):
    with open(gpt2 / name, "ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=f"{name} holds 1,099,511,627,776 bytes; wanted at most"):
        load_tokenizer(open_checkpoint(gpt2))


def test_code_that_comes_with_a_tokenizer_is_not_run_and_nobody_is_asked(gpt2, tmp_path, monkeypatch):
    (gpt2 / "evil.py").write_text(f"open({str(tmp_path / 'victim')!r}, 'w')")
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (gpt2 / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a person was asked"))
    try:
        load_tokenizer(open_checkpoint(gpt2))
    except CheckpointError as error:
        assert "cannot read the tokenizer" in str(error)
    assert not (tmp_path / "victim").exists()


def test_a_tokenizer_config_that_names_other_files_does_not_load_them(gpt2, llama, tmp_path):
    path = gpt2 / "tokenizer_config.json"
    elsewhere = {"tokenizer_file": str(llama / "tokenizer.json"), "vocab_file": "/etc/passwd"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **elsewhere}))
    assert written(gpt2, tmp_path / "t").encode("The").ids[0] != 1  # LLaMA's adds a BOS


def test_vocab_and_merges_are_enough(tmp_path):
    source = save(tiny_gpt2(), tmp_path / "hf", tokenizer=False)
    model = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    (source / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    (source / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    tokenizer, theirs = written(source, tmp_path / "t"), AutoTokenizer.from_pretrained(source)
    for text in TEXTS:
        assert tokenizer.encode(text).ids == theirs(text).input_ids
    assert len(tokenizer.encode(TEXTS[0]).ids) < len(TEXTS[0])  # merges were used


def test_a_checkpoint_without_a_tokenizer_says_what_was_wanted(tmp_path):
    source = save(tiny_gpt2(), tmp_path / "hf", tokenizer=False)
    with pytest.raises(
        CheckpointError, match="has no tokenizer; wanted tokenizer.json, tokenizer.model, or vocab"
    ):
        load_tokenizer(open_checkpoint(source))


def test_another_directorys_tokenizer_can_be_taken(tmp_path, llama):
    source = save(tiny_gpt2(), tmp_path / "hf", tokenizer=False)
    assert load_tokenizer(open_checkpoint(source), llama)("The").input_ids[0] == 1


def test_a_damaged_tokenizer_is_named(gpt2):
    (gpt2 / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=f"{gpt2}.*tokenizer.json is not valid JSON"):
        load_tokenizer(open_checkpoint(gpt2))


def test_a_written_tokenizer_that_splits_otherwise_than_transformers_is_refused(gpt2, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(open_checkpoint(gpt2))
    other = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    other.normalizer = normalizers.Lowercase()
    monkeypatch.setattr(Tokenizer, "from_str", lambda text: other)
    with pytest.raises(CheckpointError, match="tokenizer.json splits 'The quick .* transformers into"):
        save_tokenizer(tokenizer, gpt2, tmp_path / "t")


def test_the_vocabulary_ends_after_the_largest_id():
    tokenizer = tiny_tokenizer().backend_tokenizer
    assert vocabulary_size(tokenizer) == 331
    tokenizer.add_special_tokens(["<new>"])
    assert (vocabulary_size(tokenizer), vocabulary_size(tokenizer, with_added_tokens=False)) == (332, 331)


def test_a_tokenizer_without_its_unk_token_is_one_clear_error(tmp_path):
    model = models.WordLevel({"the": 0}, unk_token="<unk>")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model)).save_pretrained(tmp_path / "hf")
    checkpoint = Checkpoint(
        tmp_path / "hf", PreTrainedConfig(), None, None, [], tokenizer_dir=tmp_path / "hf"
    )
    with pytest.raises(CheckpointError, match="hf cannot encode .*: .*(UNK|unk)") as caught:
        save_tokenizer(load_tokenizer(checkpoint), tmp_path / "hf", tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_model_of_another_kind_than_its_class_is_one_clear_error(tmp_path):
    folder = tmp_path / "hf"
    tiny_tokenizer().save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for name in ("T5Tokenizer", "XLMRobertaTokenizer"):  # of Unigram models; this one is BPE
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": name}))
        checkpoint = Checkpoint(folder, PreTrainedConfig(), None, None, [], tokenizer_dir=folder)
        with pytest.raises(CheckpointError, match="of another kind than tokenizer_class") as caught:
            save_tokenizer(load_tokenizer(checkpoint), folder, tmp_path / "out")
        assert "\n" not in str(caught.value)
