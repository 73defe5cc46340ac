"""Files that try to exhaust their reader. Each maker: (folder) -> the path to open.

Each writes a few megabytes at most, or a file with a hole.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tests.checkpoints import save, tiny_gpt2, tiny_tokenizer

Maker = Callable[[Path], Path]


def tiny_gpt2_directory(folder: Path) -> Path:
    return save(tiny_gpt2(), folder, tokenizer=False)


def _hole(path: Path, size: int) -> Path:
    with open(path, "ab") as file:
        file.truncate(size)
    return path


# ---------------------------------------------------------------- GGUF

_U32, _STRING, _ARRAY = 4, 8, 9


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _gguf(keys: int, body: bytes, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + body


def _array(item: int, count: int) -> bytes:
    return _text(b"a.key") + struct.pack("<IIQ", _ARRAY, item, count)


def _llama_keys(**changes: int) -> bytes:
    values = {"block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 128}
    values |= {"attention.head_count": 4, "attention.head_count_kv": 4, **changes}
    body = _text(b"general.architecture") + struct.pack("<I", _STRING) + _text(b"llama")
    for key, value in values.items():
        body += _text(f"llama.{key}".encode()) + struct.pack("<II", _U32, value)
    epsilon = _text(b"llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5)
    return _gguf(2 + len(values), body + epsilon)


def _gguf_file(content: bytes, size: int = 0) -> Maker:
    def make(folder: Path) -> Path:
        path = folder / "model.gguf"
        path.write_bytes(content)
        return _hole(path, size) if size else path

    return make


GGUF = {
    "2^61 items": _gguf_file(_gguf(1, _array(0, 1 << 61))),
    "2^61 texts": _gguf_file(_gguf(1, _array(_STRING, 1 << 61))),
    "2^61 arrays": _gguf_file(_gguf(1, _array(_ARRAY, 1 << 61))),
    "a million arrays of nothing": _gguf_file(
        _gguf(1, _array(_ARRAY, 1 << 20) + struct.pack("<IQ", 0, 0) * (1 << 20))
    ),
    "2^60 keys": _gguf_file(_gguf(1 << 60, b"")),
    "2^60 tensors": _gguf_file(_gguf(0, b"", tensors=1 << 60)),
    "a name of 2^61 bytes": _gguf_file(_gguf(1, struct.pack("<Q", 1 << 61))),
    "a name as long as the file": _gguf_file(_gguf(1, struct.pack("<Q", 1 << 33)), 1 << 34),
    "a text as long as the file": _gguf_file(
        _gguf(1, _text(b"k") + struct.pack("<IQ", _STRING, 1 << 33)), 1 << 34
    ),
    "items in a hole": _gguf_file(_gguf(1, _array(0, 1 << 33)), 1 << 34),
    "texts in a hole": _gguf_file(_gguf(1, _array(_STRING, 1 << 30)), 1 << 34),
    "keys in a hole": _gguf_file(_gguf(1 << 30, b""), 1 << 34),
    "tensors in a hole": _gguf_file(_gguf(0, b"", tensors=1 << 28), 1 << 34),
    "2^32 dimensions": _gguf_file(_gguf(0, _text(b"t") + struct.pack("<I", 0xFFFFFFFF), 1), 1 << 36),
    "dimensions of 2^62": _gguf_file(
        _gguf(0, _text(b"t") + struct.pack("<IQQQQIQ", 4, *[1 << 62] * 4, 0, 0), 1)
    ),
    "2^32 layers": _gguf_file(_llama_keys(block_count=0xFFFFFFFF)),
    "2^32 heads": _gguf_file(_llama_keys(**{"attention.head_count": 0xFFFFFFFF})),
}

# ---------------------------------------------------------------- pickles


def nested_key() -> bytes:
    """A dict whose key is a tuple of tuples: its hash takes 2^60 steps."""
    return b"\x80\x02}(N" + b"\x85" + b"2\x86" * 60 + b"K\x01u."


def colliding_keys() -> bytes:
    """5 MB of integers that are multiples of 2^61 - 1: all have the hash 0."""
    prime, body = (1 << 61) - 1, bytearray(b"\x80\x02}(")
    for number in range(1 << 20, (1 << 20) + 280_000):
        data = pickle.encode_long(number * prime)
        body += b"\x8a" + bytes([len(data)]) + data + b"N"
    return bytes(body + b"u.")


def colliding_places() -> bytes:
    prime, body = (1 << 61) - 1, bytearray(b"\x80\x02N")
    for number in range(1 << 20, (1 << 20) + 150_000):
        body += b"p%d\n" % (number * prime)
    return bytes(body + b".")


def colliding_tuples() -> bytes:
    """Floats that differ by a power of 2^61 have one hash."""
    body = bytearray(b"\x80\x02(")
    for mantissa in range(9000):
        for power in range(16):
            body += b"G" + struct.pack(">d", float(2 * mantissa + 1) * 2.0 ** (61 * power)) + b"N"
    return bytes(body + b"d.")


def many(operation: bytes, count: int, end: bytes = b"t.") -> bytes:
    return b"\x80\x02(" + operation * count + end


def copied_state() -> bytes:
    """The state of 100,000 items is put into 100,000 objects."""
    state = b"}(" + b"".join(b"X\x06\x00\x00\x00%06dN" % number for number in range(100_000)) + b"uq\x00"
    one = b"cargparse\nNamespace\n)\x81h\x00b"
    return b"\x80\x02(" + state + one * 100_000 + b"t."


def copied_arguments() -> bytes:
    arguments = b"]q\x00(" + b"K\x01" * 200_000 + b"e"
    return b"\x80\x02(" + arguments + b"ctorch\nSize\nh\x00\x85R" * 50_000 + b"t."


def long_equal_keys() -> bytes:
    size = 4 << 20
    long_key = b"X" + struct.pack("<I", size) + bytes(size)
    return b"\x80\x02}" + long_key + b"Ns" + long_key + b"q\x00Ns" + b"h\x00Ns" * 200_000 + b"."


def many_dimensions() -> bytes:
    """A tensor of 300,000 dimensions: the product of its shape has megabytes."""
    sizes = b"(" + (b"\x8a\x08" + b"\xff" * 7 + b"\x3f") * 300_000 + b"t"
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"
    return (
        b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n("
        + storage + b"K\x00" + sizes + b"q\x00h\x00\x89NtRs."
    )  # fmt: skip


PICKLES = {
    "a key that nests": nested_key,
    "keys that collide": colliding_keys,
    "places that collide": colliding_places,
    "floats that collide": colliding_tuples,
    "5,000,000 sets": lambda: many(b"\x8f", 5_000_000),
    "5,000,000 lists": lambda: many(b"]", 5_000_000),
    "2,500,000 nested lists": lambda: b"\x80\x02" + b"]" * 2_500_000 + b"a" * 2_499_999 + b".",
    "5,000,000 marks": lambda: b"\x80\x02" + b"(" * 5_000_000 + b".",
    "an integer of 4 MB": lambda: b"\x80\x02\x8b" + struct.pack("<i", 4 << 20) + b"\x7f" * (4 << 20) + b".",
    "a bytearray of 2^40": lambda: b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "a text of 2^40": lambda: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b".",
    "a state that is copied": copied_state,
    "arguments that are copied": copied_arguments,
    "long keys that are equal": long_equal_keys,
    "300,000 dimensions": many_dimensions,
    "a part of torch by name": lambda: b"\x80\x02ctorch\n_inductor\n.",
}


def torch_zip(content: bytes) -> bytes:
    """A file of torch.save with that pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/data/0", bytes(64))
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def _legacy(content: bytes) -> bytes:
    magic, version = pickle.dumps(0x1950A86A20F9469CFC6C, 2), pickle.dumps(1001, 2)
    return magic + version + pickle.dumps({"little_endian": True}, 2) + content + pickle.dumps([], 2)


def _many_entries() -> bytes:
    """A zip file of 1,000,000 empty entries, written by hand."""
    entry = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 20, 20, 0, 0, 0, 33, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0)
    table = b"".join(entry + b"%06x" % number for number in range(400_000))
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(table), 0, 0)
    return table + end


def _weights(name: str, content: Callable[[], bytes]) -> Maker:
    """A checkpoint of GPT-2 whose weights are this."""

    def make(folder: Path) -> Path:
        tiny_gpt2_directory(folder)
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(content())
        return folder

    return make


def _megatron(content: Callable[[], bytes]) -> Maker:
    def make(folder: Path) -> Path:
        (folder / "mp_rank_00").mkdir()
        (folder / "mp_rank_00" / "model_optim_rng.pt").write_bytes(content())
        return folder

    return make


TORCH_FILES = {
    **{
        f"{kind}: {name}": _weights("pytorch_model.bin", lambda make=make, wrap=wrap: wrap(make()))
        for name, make in PICKLES.items()
        for kind, wrap in (("bin", torch_zip), ("old bin", _legacy))
        if kind == "bin" or name == "keys that collide"
    },
    **{
        f"megatron: {name}": _megatron(lambda make=make: torch_zip(make()))
        for name, make in PICKLES.items()
        if "0,000" not in name
    },
    "bin: 400,000 entries of a zip": _weights("pytorch_model.bin", _many_entries),
    "megatron: 400,000 entries of a zip": _megatron(_many_entries),
}  # fmt: skip

# ---------------------------------------------------------------- archives

_CONFIG = b"hidden_size: 64\nnum_layers: 2\nnum_attention_heads: 4\n"


def _tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _raw_header(kind: bytes, size: int, name: bytes = b"x") -> bytes:
    info = tarfile.TarInfo(name.decode())
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def _gzip_bomb() -> bytes:
    """3 MB that unpack to 3 GB of zeros, as one member."""
    piece = gzip.compress(bytes(1 << 24), 9)
    return gzip.compress(_raw_header(tarfile.REGTYPE, 3 << 30, b"model_weights.ckpt")) + piece * 192


def _pax_chain() -> bytes:
    return (_raw_header(tarfile.XHDTYPE, 12) + b"12 a=bbbbbb\n".ljust(512, b"\0")) * 20_000


def _pax_globals() -> bytes:
    records = b"".join(b"11 k%05d=\n" % number for number in range(90_000))
    header = _raw_header(tarfile.XGLTYPE, len(records)) + records + bytes(-len(records) % 512)
    member = _raw_header(tarfile.XHDTYPE, 12) + b"12 a=bbbbbb\n".ljust(512, b"\0")
    return header + b"".join(member + _raw_header(tarfile.REGTYPE, 0, b"m%05d" % n) for n in range(9000))


def _sparse_map() -> bytes:
    records = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
    body = b"99999999\n" + b"0\n" * (40 << 20)
    return gzip.compress(
        _raw_header(tarfile.XHDTYPE, len(records)) + records.ljust(512, b"\0")
        + _raw_header(tarfile.REGTYPE, len(body), b"s") + body
    )  # fmt: skip


def _aliases() -> bytes:
    lines = [b"a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [b"a%d: &a%d [%s]" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 10)) for n in range(1, 10)]
    return b"\n".join([*lines, b"target: *a9"])


def _merges() -> bytes:
    lines = [b"a0: &a0 {" + b", ".join(b"k%d: 1" % n for n in range(10)) + b"}"]
    for n in range(1, 12):
        names = b", ".join([b"*a%d" % (n - 1)] * 10)
        lines.append(b"a%d: &a%d {<<: [%s], own%d: 1}" % (n, n, names, n))
    return b"\n".join(lines)


def _nemo(content: Callable[[], bytes]) -> Maker:
    def make(folder: Path) -> Path:
        (folder / "model.nemo").write_bytes(content())
        return folder / "model.nemo"

    return make


def _config_yaml(text: Callable[[], bytes]) -> Maker:
    return _nemo(lambda: _tar({"model_config.yaml": text(), "model_weights.ckpt": b"PK"}))


ARCHIVES = {
    "a gzip bomb": _nemo(_gzip_bomb),
    "a gzip bomb in a config": _nemo(
        lambda: (
            gzip.compress(_raw_header(tarfile.REGTYPE, 2 << 30, b"model_config.yaml"))
            + gzip.compress(bytes(1 << 24)) * 128
        )
    ),
    "a header of 8 GB": lambda folder: _hole(
        _nemo(lambda: _raw_header(tarfile.XHDTYPE, 8 << 30) + b"12 a=bbbbbb\n")(folder), 9 << 30
    ),
    "a long name of 8 GB": lambda folder: _hole(
        _nemo(lambda: _raw_header(tarfile.GNUTYPE_LONGNAME, 8 << 30))(folder), 9 << 30
    ),
    "20,000 headers in a row": _nemo(_pax_chain),
    "90,000 global settings": _nemo(_pax_globals),
    "a sparse map of 40,000,000 numbers": _nemo(_sparse_map),
    "50,000 members": _nemo(lambda: b"".join(_raw_header(b"0", 0, b"m%05d" % n) for n in range(50_000))),
    "aliases in the config": _config_yaml(_aliases),
    "merges in the config": _config_yaml(_merges),
    "a config of 4 MB": _config_yaml(lambda: b"k: [" + b"1, " * (1 << 20) + b"1]"),
    "a number of 120,000 digits": _config_yaml(lambda: b"eps: " + b"1" + b":1" * 60_000),
    "pickles in an archive": _nemo(
        lambda: _tar({"model_config.yaml": _CONFIG, "model_weights.ckpt": torch_zip(colliding_keys())})
    ),
}

# ---------------------------------------------------------------- safetensors, JSON


def _safetensors(header: Callable[[], bytes], size: int = 0) -> Maker:
    def make(folder: Path) -> Path:
        tiny_gpt2_directory(folder)
        data = header()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data)
        if size:
            _hole(folder / "model.safetensors", size)
        return folder

    return make


def _many_tensors() -> bytes:
    entry = '"%07x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    return ("{" + ",".join(entry % number for number in range(1_400_000)) + "}").encode()


def _config(**changes: object) -> Maker:
    def make(folder: Path) -> Path:
        tiny_gpt2_directory(folder)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        return folder

    return make


def _json_file(name: str, content: Callable[[], bytes]) -> Maker:
    def make(folder: Path) -> Path:
        tiny_gpt2_directory(folder)
        (folder / name).write_bytes(content())
        return folder

    return make


def _index(content: Callable[[], bytes]) -> Maker:
    def make(folder: Path) -> Path:
        tiny_gpt2_directory(folder)
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_bytes(content())
        return folder

    return make


def _llama_config(**changes: object) -> Maker:
    """A checkpoint whose config alone is one of another family."""
    values = {
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, **changes,
    }  # fmt: skip
    return _json_file("config.json", lambda: json.dumps(values).encode())


HEADERS = {
    "1,400,000 tensors": _safetensors(_many_tensors),
    "a header of 99 MB": _safetensors(lambda: b'{"__metadata__":{"a":"' + b"x" * (99 << 20) + b'"}}'),
    "a nested header": _safetensors(lambda: b'{"a":' * 1_000_000),
    "300,000 dimensions": _safetensors(
        lambda: b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[' + b"9," * 300_000 + b"0]}}"
    ),
    "an index of 2,000,000 names": _index(
        lambda: (
            '{"weight_map":{'
            + ",".join(f'"{n:07x}":"model-00001-of-00001.safetensors"' for n in range(1_200_000))
            + "}}"
        ).encode()
    ),
    "an index of 500,000 files": _index(
        lambda: ('{"weight_map":{' + ",".join(f'"{n}":"f{n}"' for n in range(500_000)) + "}}").encode()
    ),
    "a config of 60 MB": _json_file("config.json", lambda: b'{"a":[' + b"{}," * (20 << 20) + b"{}]}"),
    "a config of 16 MB": _json_file("config.json", lambda: b'{"a":[' + b"{}," * (5 << 20) + b"{}]}"),
    "a nested config": _json_file("config.json", lambda: b'{"a":' + b"[" * 10_000_000),
    "an integer of 4 MB in a config": _json_file("config.json", lambda: b'{"a":' + b"9" * (4 << 20) + b"}"),
    "10^9 layers": _llama_config(num_hidden_layers=10**9),
    "10^9 layers of GPT-2": _config(n_layer=10**9),
    "10^9 labels": _config(num_labels=10**9),
    "10^9 layers of Gemma 3": _llama_config(model_type="gemma3_text", num_hidden_layers=10**9),
    "a sliding window of 10^30": _llama_config(sliding_window=10**30, use_sliding_window=True),
    "10^12 positions": _config(n_positions=10**12),
    "a vocabulary of 10^12": _config(vocab_size=10**12),
    "4,000,000 end ids": _json_file(
        "generation_config.json", lambda: b'{"eos_token_id":[' + b"1," * (4 << 20) + b"1]}"
    ),
}  # fmt: skip

# ---------------------------------------------------------------- tokenizers


def _tokenizer(change: Callable[[dict], None]) -> Maker:
    """A folder whose tokenizer.json is changed."""

    def make(folder: Path) -> Path:
        tiny_tokenizer(adds_bos=True).save_pretrained(folder)
        path = folder / "tokenizer.json"
        state = json.loads(path.read_text())
        change(state)
        path.write_text(json.dumps(state))
        return folder

    return make


def _template_ids(state: dict) -> None:
    (special,) = state["post_processor"]["special_tokens"].values()
    special["ids"], special["tokens"] = special["ids"] * 100_000, special["tokens"] * 100_000


def _template_parts(state: dict) -> None:
    state["post_processor"]["single"] *= 50_000


def _added_tokens(state: dict) -> None:
    first = len(state["model"]["vocab"]) + len(state["added_tokens"])
    one = state["added_tokens"][0]
    state["added_tokens"] += [{**one, "id": first + n, "content": f"<extra {n}>"} for n in range(150_000)]


def _split(pattern: str) -> Callable[[dict], None]:
    def change(state: dict) -> None:
        state["pre_tokenizer"] = {
            "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False,
        }  # fmt: skip

    return change


def _named(name: str, content: Callable[[], bytes]) -> Maker:
    def make(folder: Path) -> Path:
        tiny_tokenizer().save_pretrained(folder)
        (folder / name).write_bytes(content())
        return folder

    return make


def _proto_piece(text: bytes, kind: int = 1) -> bytes:
    inner = b"\x0a" + _varint(len(text)) + text + b"\x15" + struct.pack("<f", -1.0) + b"\x18" + bytes([kind])
    return b"\x0a" + _varint(len(inner)) + inner


def _varint(value: int) -> bytes:
    data = bytearray()
    while value >= 128:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


_BPE_TRAINER = b"\x12\x02\x18\x02"  # trainer_spec { model_type: BPE }


def _sentencepiece(content: Callable[[], bytes], settings: dict | None = None) -> Maker:
    def make(folder: Path) -> Path:
        (folder / "tokenizer.model").write_bytes(content())
        if settings is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    return make


def _pieces(count: int, text: bytes = b"p%07d") -> bytes:
    start = _proto_piece(b"<unk>", 2) + _proto_piece(b"<s>", 3) + _proto_piece(b"</s>", 3)
    return start + b"".join(_proto_piece(text % n) for n in range(count)) + _BPE_TRAINER


def _one_long_piece() -> bytes:
    return _pieces(100) + _proto_piece(b"ab" * (2 << 20))


LLAMA = {"tokenizer_class": "LlamaTokenizer"}
TOKENIZERS = {
    "100,000 ids of a template": _tokenizer(_template_ids),
    "50,000 parts of a template": _tokenizer(_template_parts),
    "150,000 added tokens": _tokenizer(_added_tokens),
    "a pattern that backtracks": _tokenizer(_split(r"((\w|\s)*)*\d\d\d\d\d\d\d\d$")),
    "60 MB of objects": _named("tokenizer.json", lambda: b'{"a":[' + b"{}," * (20 << 20) + b"{}]}"),
    "60 MB of nesting": _named("tokenizer.json", lambda: b"[" * (60 << 20)),
    "60 MB of settings": _named(
        "tokenizer_config.json", lambda: b'{"a":[' + b"{}," * (20 << 20) + b"{}]}"
    ),
    "200,000 tokens in the settings": _named(
        "tokenizer_config.json",
        lambda: json.dumps(
            {
                "added_tokens_decoder": {
                    str(n): {"content": f"<{n}>", "special": True} for n in range(2000, 202_000)
                }
            }
        ).encode(),
    ),
    "6,000,000 pieces": _sentencepiece(lambda: b"\x0a\x00" * 6_000_000 + _BPE_TRAINER),
    "6,000,000 pieces for LLaMA": _sentencepiece(lambda: b"\x0a\x00" * 6_000_000 + _BPE_TRAINER, LLAMA),
    "3,000,000 named pieces": _sentencepiece(lambda: _pieces(3_000_000)),
    "a piece of 4 MB": _sentencepiece(_one_long_piece),
    "a piece of 4 MB for LLaMA": _sentencepiece(_one_long_piece, LLAMA),
    "20,000 pieces of 1,000 characters": _sentencepiece(lambda: _pieces(20_000, b"%07d" + b"ab" * 500)),
}  # fmt: skip
