"""Requests drawn from the schema of every model and then spoilt, over gRPC and HTTP, together with controls.

    python -m tests.reliability.fuzz --seed 7 --count 100000 --minutes 15
    python -m tests.reliability.fuzz --seed 7 --index 4711          one of them again

Request number i of a seed is always the same, so what fails can be sent alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tritonclient.grpc import service_pb2

from tests.reliability.report import table
from tests.reliability.service import Service, build_repository, end_on_sigterm
from tests.reliability.traffic import Clients, clean, controls
from tests.reliability.wire import (
    NUMPY,
    Outcome,
    Tensor,
    _varint,
    grpc_request,
    http_call,
    http_request,
    json_infer,
)
from tridecode.model_repo_templates.pbtxt import data_type_name, parse_model_config
from tridecode.model_repo_templates.served import SERVED

LIMIT_S = 25.0  # a request that has not ended after this time hangs
WORKERS = 24
HIDDEN = 48  # of service.build_repository's model
CONTROL_EVERY = 100  # requests
JSON_ELEMENTS = 1 << 20  # a JSON shape beyond memory aborts Triton 2.51: only in LETHAL

WHOLE = [
    0,
    1,
    2,
    3,
    7,
    -1,
    331,
    1023,
    1024,
    1025,
    50256,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
    -(2**31),
]
REALS = [
    0.0,
    -0.0,
    0.5,
    1.0,
    -0.5,
    2.0,
    1e-30,
    1e30,
    1e300,
    65504.0,
    float("nan"),
    float("inf"),
    float("-inf"),
]
TEXTS = [
    b"",
    b"the city",
    b"\xff\xfe\xfa",
    b"a,b",
    b'"',
    b'a,"b',
    "今日は🙂".encode(),
    b"\0",
    b"x" * 5000,
    b"</s>",
    b"the\xc3",
    b" ",
    b"\n\r\t",
    b"\xe2\x80\xae\xed\x9f\xbf",
]
#: kinds and texts of structured outputs; few fit together
GUIDE_TYPES = [b"json", b"json_schema", b"regex", b"ebnf_grammar", b"structural_tag", b"yaml", b"\xff", b""]
GUIDES = [
    b"",
    b"{}",
    b'{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
    b'{"type": "array", "uniqueItems": true}',
    b'{"items":' * 2000 + b"{}" + b"}" * 2000,
    b'{"$ref": "#"}',
    b"[0-9]{1,4}",
    b"(((a{0,99}){0,99}){0,99})*(?=b)",
    b'start: "a" start',
    b"root ::= " + b"(" * 3000,
    b"\xff\xfe",
    b"x" * 70_000,
]
SAMPLING = [  # vLLM's sampling_parameters
    b"",
    b"{}",
    b"[1]",
    b"{",
    b'{"max_tokens": 2, "temperature": "0.5", "top_p": "0.9"}',
    b'{"max_tokens": 2, "logprobs": 20}',
    b'{"temperature": NaN}',
    b'{"max_tokens": 1e999}',
    b'{"seed": 99999999999999999999999}',
    b'{"stop": ["a", 1]}',
    b'{"top_k": 1, "top_k": 2}',
    b'{"topk": 1}',
    b'{"stop": ' + b"[" * 3000 + b"]" * 3000 + b"}",
    b'{"bad_words": ["\\ud800"]}',
    b'{"stop": "\xff"}',
    b'{"logit_bias": {"5": 100}, "max_tokens": 2}',
    b'{"logit_bias": {"5": 101}}',
    b'{"logit_bias": {"5": NaN}}',
    b'{"logit_bias": {"-5": 1, "": 2, "5e1": 3}}',
    b'{"logit_bias": {' + b", ".join(b'"%d": 1' % token for token in range(1025)) + b"}}",
    b'{"allowed_token_ids": [5, 6], "max_tokens": 2}',
    b'{"allowed_token_ids": [-1]}',
    b'{"structured_outputs": {"regex": "[0-9]{2}"}, "max_tokens": 4}',
    b'{"guided_json": {"type": "array", "uniqueItems": true}}',
    b'{"guided_grammar": "start: start", "max_tokens": 4}',
    b'{"allowed_token_ids": []}',
    b'{"no_repeat_ngram_size": 2, "typical_p": 0.5, "max_tokens": 2}',
    b'{"prompt_logprobs": 1, "best_of": 2, "max_tokens": 2}',
]
SMALL = {"request_output_len", "max_tokens", "INPUT_1", "REQUEST_OUTPUT_LEN"}  # fields that cost steps
VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1e300,
    2**63 - 1,
    2**64 - 1,
    "",
    "x" * 300,
    "\u0000",
    "1",
    [],
    {},
    [1, "a"],
]
VALUES += [{"a": {"b": [1, {"c": None}]}}, 0.5, "NaN", -1e300]
NAMES = ["timeout", "priority", "sequence_id", "sequence_start", "sequence_end", "id", "binary_data_output"]
NAMES += ["triton_enable_empty_final_response", "topk", "max_tokens", "", "a" * 300, "ключ", "temperature"]

#: Triton's own texts for requests that never reach a door, which it calls internal
TRITONS_OWN = re.compile(
    r"Unable to parse|failed to parse the request|attempt to (access|get)|was not found in the JSON"
    r"|unexpected (explicit|total|size|additional)|Shape does not match|missing in JSON|failed to decode"
    r"|Invalid 'shape'|Exceeds maximum|Unsupported input shape",
    re.IGNORECASE,
)
GRPC_CODES = {"", "INVALID_ARGUMENT", "UNIMPLEMENTED", "UNAVAILABLE", "NOT_FOUND", "DEADLINE_EXCEEDED"}
GRPC_CODES |= {"CANCELLED", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "OUT_OF_RANGE", "ALREADY_EXISTS"}
HTTP_CODES = {"200", "400", "401", "403", "404", "405", "411", "413", "429", "499", "501", "503", "504"}

#: model-control, memory, log and trace interfaces: (HTTP path, body) and (gRPC method, request)
CONTROL_HTTP = [
    ("/v2/repository/models/tridecode_no_such_model/load", {}),
    ("/v2/repository/models/tridecode_no_such_model/unload", {}),
    ("/v2/systemsharedmemory/region/fuzz/register", {"key": "/fuzz", "offset": 0, "byte_size": 4}),
    ("/v2/systemsharedmemory/unregister", {}),
    ("/v2/cudasharedmemory/unregister", {}),
    ("/v2/logging", {"log_verbose_level": 0}),
    ("/v2/trace/setting", {"trace_level": ["OFF"]}),
]
CONTROL_GRPC = [
    ("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name="tridecode_no_such_model")),
    ("RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name="tridecode_no_such_model")),
    (
        "SystemSharedMemoryRegister",
        service_pb2.SystemSharedMemoryRegisterRequest(name="fuzz", key="/fuzz", byte_size=4),
    ),
    ("SystemSharedMemoryUnregister", service_pb2.SystemSharedMemoryUnregisterRequest()),
    ("LogSettings", service_pb2.LogSettingsRequest()),
    ("TraceSetting", service_pb2.TraceSettingRequest()),
]
REFUSED = re.compile(
    r"restricted|not allowed|disabled|polling|unsupported|unauthori|forbidden", re.IGNORECASE
)


@dataclass(frozen=True)
class Schema:
    """Inputs and settings of a model, from its config.pbtxt."""

    name: str
    batched: bool
    decoupled: bool
    inputs: tuple[tuple[str, str, tuple[int, ...], bool], ...]  # name, datatype, dims, optional
    outputs: tuple[str, ...]


def read_schemas(repository: Path) -> list[Schema]:
    found = []
    for path in sorted(repository.glob("*/config.pbtxt")):
        config = parse_model_config(path.read_text(), str(path))
        inputs = tuple(
            (
                tensor.name,
                data_type_name(tensor.data_type).replace("STRING", "BYTES"),
                tuple(tensor.dims),
                tensor.optional,
            )
            for tensor in config.input
        )
        outputs = tuple(tensor.name for tensor in config.output)
        decoupled = config.model_transaction_policy.decoupled
        found.append(Schema(config.name, config.max_batch_size > 0, decoupled, inputs, outputs))
    return found


# ---------------------------------------------------------------- drawing a request


@dataclass
class Shot:
    """One request, ready to be sent."""

    index: int
    kind: str
    way: str
    model: str
    payload: bytes
    notes: list[str] = field(default_factory=list)
    leave_s: float = 0.0
    cancel_after: int = -1
    half_close: bool = False
    method: str = "ModelInfer"
    may_close: bool = False  # the server may answer by closing the connection

    def label(self) -> str:
        return f"#{self.index} {self.way} {self.model} {', '.join(self.notes)[:160]}"


class Drawer:
    """Draws request number i of a seed."""

    def __init__(self, schemas: Sequence[Schema], seed: int) -> None:
        self._schemas, self._seed = list(schemas), seed

    def draw(self, index: int) -> Shot:
        random_ = random.Random(f"{self._seed} {index}")
        return _Draw(random_, random_.choice(self._schemas), index).shot()


class _Draw:
    def __init__(self, random_: random.Random, schema: Schema, index: int) -> None:
        self.r, self.schema, self.index = random_, schema, index
        self.notes: list[str] = []
        self.rows = 1

    def shot(self) -> Shot:
        fate = self.r.random()
        if fate < 0.03:
            return self._control_api()
        if fate < 0.08:
            return self._broken_http()
        tensors = self._sensible()
        for _ in range(self.r.choice([0, 1, 1, 1, 2, 2, 3])):
            self.r.choice(self._mutations())(tensors)
        ways = ["grpc", "stream", "http", "http_binary", "generate", "generate_stream"]
        way = self.r.choice(ways if self.r.random() < 0.3 else self._fitting_ways())
        shot = self._encode(way, tensors)
        if self.r.random() < 0.06:
            self._leave(shot)
        return shot

    def _fitting_ways(self) -> list[str]:
        if self.schema.decoupled:
            return ["stream", "stream", "generate_stream", "generate"]
        return ["grpc", "grpc", "http", "http_binary", "stream", "generate"]

    # ------------------------------------------------------------ tensors

    def _sensible(self) -> list[Tensor]:
        self.rows = self.r.choice([1, 1, 1, 1, 2, 3]) if self.schema.batched else 1
        width = self.r.randint(1, 12)
        self.width = width
        return [
            self._tensor(name, datatype, dims)
            for name, datatype, dims, optional in self.schema.inputs
            if not optional
        ]

    def _tensor(self, name: str, datatype: str, dims: tuple[int, ...], edge: bool = False) -> Tensor:
        per_row = [self.r.randint(0, 3) if edge else self._dim(name) if dim < 0 else dim for dim in dims]
        shape = ([self.rows] if self.schema.batched else []) + per_row
        count = 1
        for dim in shape:
            count *= dim
        return Tensor(name, datatype, shape, [self._value(name, datatype, edge) for _ in range(count)])

    def _dim(self, name: str) -> int:
        return self.width if name in ("input_ids", "TOKENS_BATCH") else 1

    def _value(self, name: str, datatype: str, edge: bool = False):
        if datatype == "BYTES":
            if name == "sampling_parameters":
                return self.r.choice(SAMPLING if edge else SAMPLING[4:6])
            if name.startswith("guided_decoding_guide"):
                return self.r.choice(GUIDE_TYPES if name.endswith("_type") else GUIDES)
            if edge:
                return self.r.choice(TEXTS)
            return b"the small city" if name in ("text_input", "INPUT_0", "QUERY") else b""
        if datatype == "BOOL":
            return self.r.random() < 0.5
        if datatype.startswith("FP"):
            return self.r.choice(REALS) if edge else 1.0
        if edge:
            return self.r.choice(WHOLE[:6] + WHOLE[10:] if name in SMALL else WHOLE)
        if name in ("input_ids", "TOKENS_BATCH"):
            return self.r.randrange(3, 330)
        return self.width if name == "input_lengths" else self.r.randint(1, 6)

    # ------------------------------------------------------------ mutations

    def _mutations(self) -> list[Callable[[list[Tensor]], None]]:
        common = [self._edges, self._optional, self._optional, self._optional, self._shape, self._dtype]
        common += [self._drop, self._duplicate, self._unknown, self._length, self._bytes, self._batch]
        common += [self._prompt_table]
        return [*common, *common, *common, self._large, self._region, self._wrapping_shape]

    def _pick(self, tensors: list[Tensor]) -> int:
        return self.r.randrange(len(tensors)) if tensors else -1

    def _edges(self, tensors: list[Tensor]) -> None:
        if (at := self._pick(tensors)) < 0 or isinstance(tensors[at].data, bytes):
            return
        old = tensors[at]
        data = list(old.data)
        for place in self.r.sample(range(len(data)), min(len(data), 2)):
            data[place] = self._value(old.name, old.datatype, edge=True)
        self.notes.append(f"{old.name}={_short(data)}")
        tensors[at] = Tensor(old.name, old.datatype, old.shape, data)

    def _optional(self, tensors: list[Tensor]) -> None:
        absent = [i for i in self.schema.inputs if i[3] and i[0] not in {t.name for t in tensors}]
        if absent:
            name, datatype, dims, _ = self.r.choice(absent)
            tensors.append(self._tensor(name, datatype, dims, edge=True))
            self.notes.append(f"+{name}={_short(tensors[-1].data)}")

    def _prompt_table(self, tensors: list[Tensor]) -> None:
        """A table of prompt learning of all rows, with the tensors that belong to it; often a right one."""
        known = {name for name, *_ in self.schema.inputs}
        right, positions = self.r.random() < 0.5, self.r.randint(1, 4)
        shape = [
            self.rows,
            positions,
            HIDDEN if right or self.r.random() < 0.5 else self.r.choice([0, 1, 47, 96]),
        ]
        values = [self.r.random() for _ in range(self.rows * positions * shape[2])]
        if values and not right:
            values[self.r.randrange(len(values))] = self.r.choice(REALS)
        counts = [self.r.randint(0, positions if right else positions + 1) for _ in range(self.rows)]
        kinds = [self.r.choice([0, 1, 3] if right else [1, 2, 3, 4]) for _ in range(self.rows)]
        column = [self.rows, 1]
        if "request_prompt_embedding" in known:
            tensors.append(Tensor("request_prompt_embedding", "FP16", shape, values))
            tensors.append(Tensor("request_prompt_lengths", "UINT32", column, counts))
            tensors.append(Tensor("request_prompt_type", "UINT32", column, kinds))
        elif "prompt_embedding_table" in known:
            tensors.append(Tensor("prompt_embedding_table", "FP16", shape, values))
            tensors.append(Tensor("prompt_vocab_size", "INT32", column, counts))
        else:
            return
        self.notes.append(f"a prompt table {shape}, {counts}, {kinds}")

    def _shape(self, tensors: list[Tensor]) -> None:
        if (at := self._pick(tensors)) < 0:
            return
        dims = [0, 1, 2, 3, 5, -1, -2, 64, 1024, 1025, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63)]
        shape = [self.r.choice(dims) for _ in range(self.r.randint(0, 4))]
        self.notes.append(f"{tensors[at].name} shape {shape}")
        tensors[at] = Tensor(tensors[at].name, tensors[at].datatype, shape, tensors[at].data)

    def _wrapping_shape(self, tensors: list[Tensor]) -> None:
        """A shape whose product wraps to 0, with as many bytes: right for Triton, beyond memory for numpy."""
        variable = [one for one in self.schema.inputs if -1 in one[2]]
        if not variable:
            return self._shape(tensors)
        self.rows = 4
        name, datatype, dims, _ = self.r.choice(variable)
        tensors[:] = [self._tensor(*one[:3]) for one in self.schema.inputs if not one[3] and one[0] != name]
        free = [at for at, dim in enumerate(dims) if dim < 0]
        if len(free) > 1 and self.r.random() < 0.5:
            sizes = self.r.choice([[2**32, 2**32], [0, 2**61], [2**62, 0], [2**31, 2**31]])
        else:
            sizes = [self.r.choice([2**62, 2**60, 2**61])]
        per_row = [1 if dim < 0 else dim for dim in dims]
        for at, size in zip(self.r.sample(free, len(sizes)), sizes):
            per_row[at] = size
        shape = [*([self.rows] if self.schema.batched else []), *per_row]
        self.notes.append(f"{name} shape {shape} of 0 bytes")
        tensors.append(Tensor(name, datatype, shape, b""))

    def _dtype(self, tensors: list[Tensor]) -> None:
        if (at := self._pick(tensors)) < 0:
            return
        datatype = self.r.choice([*NUMPY, "BYTES", "BF16", "STRING", "", "TYPE_FP32", "x" * 40])
        self.notes.append(f"{tensors[at].name} as {datatype[:10]}")
        tensors[at] = Tensor(tensors[at].name, datatype, tensors[at].shape, tensors[at].raw())

    def _drop(self, tensors: list[Tensor]) -> None:
        if (at := self._pick(tensors)) >= 0:
            self.notes.append(f"-{tensors.pop(at).name}")

    def _duplicate(self, tensors: list[Tensor]) -> None:
        if (at := self._pick(tensors)) >= 0:
            self.notes.append(f"{tensors[at].name} twice")
            tensors.insert(self.r.randrange(len(tensors) + 1), tensors[at])

    def _unknown(self, tensors: list[Tensor]) -> None:
        name = self.r.choice(
            ["nosuch", "", "ключ", "a" * 1000, "text_input\0", "INPUT_0", "input_ids", "../x"]
        )
        self.notes.append(f"+{name[:20]}")
        tensors.append(Tensor(name, "INT32", [1, 1], [1]))

    def _length(self, tensors: list[Tensor]) -> None:
        if (at := self._pick(tensors)) < 0:
            return
        raw = tensors[at].raw()
        cut = self.r.choice([raw[:-1], raw + b"\1", b"", raw * 2, raw[: len(raw) // 2]])
        self.notes.append(f"{tensors[at].name} has {len(cut)} bytes of {len(raw)}")
        tensors[at] = Tensor(tensors[at].name, tensors[at].datatype, tensors[at].shape, cut)

    def _bytes(self, tensors: list[Tensor]) -> None:
        texts = [at for at, tensor in enumerate(tensors) if tensor.datatype == "BYTES"]
        if not texts:
            return self._edges(tensors)
        at = self.r.choice(texts)
        raw = self.r.choice(
            [
                b"\xff\xff\xff\xffabc",
                b"\x05\0\0\0abc",
                b"\0\0\0",
                b"\x01\0\0\0a\x01\0\0\0b",
                (2**31).to_bytes(4, "little"),
            ]
        )
        self.notes.append(f"{tensors[at].name} serialised as {raw!r}")
        tensors[at] = Tensor(tensors[at].name, "BYTES", tensors[at].shape, raw)

    def _batch(self, tensors: list[Tensor]) -> None:
        """More rows than one tensor, or the model, has."""
        rows = self.r.choice([0, 2, 5, 33, 1024, 1025])
        if rows >= 1024 and self.r.random() < 0.9:
            rows = 3
        for at, tensor in enumerate(tensors):
            if isinstance(tensor.data, list) and tensor.shape and tensor.shape[0] == self.rows:
                row = tensor.data[: len(tensor.data) // max(1, self.rows)]
                tensors[at] = Tensor(tensor.name, tensor.datatype, [rows, *tensor.shape[1:]], row * rows)
                if self.r.random() < 0.1:
                    break
        self.notes.append(f"{rows} rows")

    def _region(self, tensors: list[Tensor]) -> None:
        """An input in a shared memory region that nobody registered."""
        if (at := self._pick(tensors)) >= 0:
            tensor = tensors[at]
            region = self.r.choice(["fuzz", "triton_python_backend_shm_region_1", "x" * 300])
            tensors[at] = Tensor(tensor.name, tensor.datatype, tensor.shape, tensor.data, region)
            self.notes.append(f"{tensor.name} in region {region[:20]}")

    def _large(self, tensors: list[Tensor]) -> None:
        """Rarely, a lot of it: words, width, text."""
        if (at := self._pick(tensors)) < 0:
            return
        tensor = tensors[at]
        size = self.r.choice([2_000, 5_000, 20_000] if self.r.random() < 0.95 else [100_000, 1_000_000])
        self.notes.append(f"{tensor.name} with {size:,}")
        if tensor.datatype == "BYTES":
            kind = self.r.randrange(3)
            if kind == 0:
                tensors[at] = Tensor(tensor.name, "BYTES", [1, 1], [b"a b" * (size // 3)])
            elif kind == 1:
                tensors[at] = Tensor(
                    tensor.name, "BYTES", [1, size // 10], [b"w%d" % i for i in range(size // 10)]
                )
            else:
                tensors[at] = Tensor(
                    tensor.name, "BYTES", [1, 1], [b",".join(b"w%d" % i for i in range(size // 5))]
                )
        else:
            tensors[at] = Tensor(tensor.name, tensor.datatype, [1, size], [3] * size)

    # ------------------------------------------------------------ the request around them

    def _parameters(self) -> dict:
        if self.r.random() < 0.75:
            return {}
        found = {self.r.choice(NAMES): self.r.choice(VALUES) for _ in range(self.r.randint(1, 3))}
        self.notes.append(f"parameters {_short(found)}")
        return found

    def _outputs(self) -> list[str]:
        if self.r.random() < 0.8:
            return []
        names = [*self.schema.outputs, "nosuch", "", "text_output"]
        chosen = [self.r.choice(names) for _ in range(self.r.randint(1, 3))]
        self.notes.append(f"outputs {chosen}")
        return chosen

    def _id(self) -> bytes:
        if self.r.random() < 0.85:
            return b""
        return self.r.choice([b"r1", b"\xff\xfe", b"a" * 10_000, "запрос".encode(), b"\0", b"stop"])

    def _encode(self, way: str, tensors: list[Tensor]) -> Shot:
        parameters, outputs = self._parameters(), self._outputs()
        shot = Shot(self.index, "tensors", way, self.schema.name, b"", self.notes)
        if way in ("grpc", "stream"):
            id_ = self._id()
            if way == "stream":
                parameters = {"triton_enable_empty_final_response": True, **parameters}
                parameters["triton_enable_empty_final_response"] = True
            shot.payload = grpc_request(self.schema.name, tensors, outputs, id_, parameters)
            if id_:
                self.notes.append(f"id {id_[:12]!r}")
            self._raw_parameter(shot)
            shot.may_close = any("not UTF-8" in note or "xff" in note for note in self.notes)
        elif way in ("http", "http_binary"):
            if way == "http":
                tensors = [_with_json_shape(tensor) for tensor in tensors]
            extra: dict = {"parameters": parameters} if parameters else {}
            if self.r.random() < 0.05:
                extra["id"] = self.r.choice(["\udcff", "r1", "x" * 5000, 7, None])
            shot.payload = json_infer(self.schema.name, tensors, outputs, way == "http_binary", **extra)
        else:
            shot.payload = self._generate(way, tensors, parameters)
        return shot

    def _raw_parameter(self, shot: Shot) -> None:
        """A parameter whose name is not UTF-8, which no client library would send."""
        if self.r.random() < 0.02:
            entry = b"\x0a\x03\xff\xfea\x12\x02\x10\x01"
            shot.payload += b"\x22" + _varint(len(entry)) + entry
            self.notes.append("a parameter with a name that is not UTF-8")

    def _generate(self, way: str, tensors: list[Tensor], parameters: dict) -> bytes:
        body: dict = {}
        for tensor in tensors:
            data = [0] if isinstance(tensor.data, bytes) else tensor.data
            values = [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in data]
            body[tensor.name] = values[0] if len(values) == 1 and self.r.random() < 0.8 else values
        if parameters:
            if self.r.random() < 0.5:
                body["parameters"] = parameters
            else:
                body.update(parameters)
        if self.r.random() < 0.1:
            body[self.r.choice(["text_input", "max_tokens", "top_p", "nosuch"])] = self.r.choice(VALUES)
            self.notes.append("a field of another type")
        return http_request(f"/v2/models/{self.schema.name}/{way}", json.dumps(body).encode())

    def _leave(self, shot: Shot) -> None:
        shot.kind = "leaves"
        if shot.way == "stream":
            shot.cancel_after = self.r.choice([0, 0, 1, 2])
        else:
            shot.leave_s = self.r.choice([0.0005, 0.01, 0.05])
        self.notes.append("the client leaves")

    def _control_api(self) -> Shot:
        if self.r.random() < 0.5:
            path, body = self.r.choice(CONTROL_HTTP)
            return Shot(
                self.index, "control", "http", path, http_request(path, json.dumps(body).encode()), [path]
            )
        method, request = self.r.choice(CONTROL_GRPC)
        payload = request.SerializeToString()
        return Shot(self.index, "control", "grpc", method, payload, [method], method=method)

    def _broken_http(self) -> Shot:
        name = self.schema.name
        path = self.r.choice(
            [f"/v2/models/{name}/infer", f"/v2/models/{name}/generate", f"/v2/models/{name}/generate_stream"]
        )
        depth = self.r.choice([10, 100, 1000])
        good = json_infer(name, [_with_json_shape(tensor) for tensor in self._sensible()])
        head, body = good.split(b"\r\n\r\n", 1)
        choices: list[tuple[str, bytes, bool]] = [
            ("truncated body", head + b"\r\n\r\n" + body[: len(body) // 2], True),
            ("no JSON", http_request(path, b"{nonsense"), False),
            ("empty body", http_request(path, b""), False),
            ("an array", http_request(path, b"[1, 2]"), False),
            ("nested arrays", http_request(path, b"[" * depth + b"]" * depth), False),
            (
                "nested parameters",
                http_request(path, b'{"parameters": ' + b'{"a": ' * depth + b"1" + b"}" * depth + b"}"),
                False,
            ),
            ("not UTF-8", http_request(path, b'{"text_input": "\xff\xfe", "max_tokens": 2}'), False),
            ("unknown model", http_request("/v2/models/nosuch/infer", body), False),
            ("unknown version", http_request(f"/v2/models/{name}/versions/99/infer", body), False),
            ("odd version", http_request(f"/v2/models/{name}/versions/abc/infer", body), False),
            ("GET", http_request(path, b"", method="GET"), False),
            ("PUT", http_request(path, body, method="PUT"), False),
            ("dots", http_request("/v2/models/..%2f..%2fetc/infer", body), False),
            (
                "wrong header length",
                http_request(path, body, {"Inference-Header-Content-Length": "99999999"}),
                False,
            ),
            (
                "negative header length",
                http_request(path, body, {"Inference-Header-Content-Length": "-1"}),
                False,
            ),
            ("odd encoding", http_request(path, body, {"Content-Encoding": "gzip"}), False),
            ("inputs is a number", http_request(path, b'{"inputs": 3}'), False),
            ("null inputs", http_request(path, b'{"inputs": null, "outputs": null, "id": null}'), False),
            ("1e400", http_request(path, b'{"text_input": "a", "max_tokens": 1e400}'), False),
        ]
        note, payload, half = self.r.choice(choices)
        shot = Shot(self.index, "broken http", "http", name, payload, [note], half_close=half)
        shot.may_close = True
        return shot


def _with_json_shape(tensor: Tensor) -> Tensor:
    elements = 1
    for dim in tensor.shape:
        elements *= max(1, abs(dim))
    if elements <= JSON_ELEMENTS:
        return tensor
    return Tensor(
        tensor.name, tensor.datatype, [dim if abs(dim) < 9 else 9 for dim in tensor.shape], tensor.data
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 50 else text[:47] + "..."


# ---------------------------------------------------------------- sending and judging


def judge(shot: Shot, outcome: Outcome) -> str:
    """The fault in how a request ended; "" if there is none."""
    if outcome.kind == "cancelled":
        return ""
    complaint = clean(outcome)
    if outcome.kind == "error" and outcome.code == "OK" and shot.may_close:
        return ""  # no protobuf message: gRPC ends the stream
    if outcome.kind == "error" and outcome.code == "CONNECTION":
        return "" if shot.may_close else f"the connection was closed without an answer ({outcome.text})"
    if complaint:
        return complaint
    if shot.kind == "control":
        refused = outcome.kind == "error" and (
            outcome.code in ("401", "403", "404", "405", "UNIMPLEMENTED", "PERMISSION_DENIED")
            or REFUSED.search(outcome.text)
        )
        return "" if refused else f"not refused: {outcome.kind} {outcome.code} {outcome.text[:200]}"
    if outcome.kind == "error":
        codes = GRPC_CODES if shot.way in ("grpc", "stream") else HTTP_CODES
        if outcome.code not in codes and not TRITONS_OWN.search(outcome.text):
            return f"code {outcome.code}: {outcome.text[:300]}"
    return ""


@dataclass
class Tally:
    """One line of the table."""

    sent: int = 0
    answers: int = 0
    errors: int = 0
    left: int = 0
    bad: int = 0
    slowest_s: float = 0.0


@dataclass
class FuzzResult:
    seed: int
    sent: int = 0
    seconds: float = 0.0
    tallies: dict[str, Tally] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    controls: int = 0
    controls_wrong: list[str] = field(default_factory=list)
    controls_slowest_s: float = 0.0

    def complaints(self) -> list[str]:
        kinds = Counter(re.sub(r"#\d+ ", "", one)[:110] for one in self.violations)
        return [
            *(f"control changed: {name}" for name in sorted(set(self.controls_wrong))),
            *(f"{count} x {kind}" for kind, count in kinds.most_common(40)),
        ]

    def table(self) -> str:
        rows = [
            [
                name,
                f"{t.sent:,}",
                f"{t.answers:,}",
                f"{t.errors:,}",
                f"{t.left:,}",
                f"{t.slowest_s:.1f}",
                str(t.bad),
            ]
            for name, t in sorted(self.tallies.items())
        ]
        head = (
            f"seed {self.seed}: {self.sent:,} requests in {self.seconds:.0f} s "
            f"({self.sent / max(self.seconds, 1e-9):.0f} per second) and {self.controls:,} controls, "
            f"{len(self.controls_wrong)} with other tokens\n\n"
        )
        return head + table(["requests", "sent", "answers", "errors", "left", "slowest s", "not clean"], rows)


class Fuzzer:
    """Sends the requests of a seed to one server, with controls at the same time."""

    def __init__(self, service: Service, clients: Clients, seed: int) -> None:
        self.service, self.clients = service, clients
        self.drawer = Drawer(read_schemas(service.repository), seed)
        self.result = FuzzResult(seed)
        self._asks = controls()
        self._reference = clients.digests(self._asks)
        self._next = 0

    def run(self, count: int, seconds: float, first: int = 0) -> FuzzResult:
        """Requests first … first + count - 1, or as many as the time allows."""
        pids, log = self.service.lasting_pids(), len(self.service.log())
        start = time.monotonic()
        self._next = first
        self.clients.loop.run(self._all(first + count, start + seconds), seconds + 120)
        result = self.result
        result.seconds = time.monotonic() - start
        time.sleep(0.5)
        now = self.service.lasting_pids()
        for role, pid in pids.items():
            if now.get(role) != pid:
                result.violations.append(f"{role} was process {pid} and is {now.get(role, 'gone')}")
        traces = self.service.log()[log:].count("Traceback (most recent call last)")
        if traces:
            result.violations.append(f"{traces} tracebacks in the server's log")
        return result

    async def _all(self, end: int, deadline: float) -> None:
        self._running = True
        beside = asyncio.ensure_future(self._controls())
        await asyncio.gather(*(self._worker(end, deadline) for _ in range(WORKERS)))
        self._running = False
        await beside

    async def _worker(self, end: int, deadline: float) -> None:
        while self._next < end and time.monotonic() < deadline and len(self.result.violations) < 2000:
            index, self._next = self._next, self._next + 1
            await self.one(self.drawer.draw(index))
            if index % CONTROL_EVERY == 0:
                await self._control(index // CONTROL_EVERY)

    async def one(self, shot: Shot) -> Outcome:
        outcome = await self.send(shot)
        result = self.result
        result.sent += 1
        tally = result.tallies.setdefault(f"{shot.kind}, {shot.way}", Tally())
        tally.sent += 1
        tally.answers += outcome.kind == "answer"
        tally.errors += outcome.kind == "error"
        tally.left += outcome.kind == "cancelled"
        tally.slowest_s = max(tally.slowest_s, outcome.end - outcome.start)
        complaint = judge(shot, outcome)
        if complaint:
            tally.bad += 1
            result.violations.append(f"{complaint} <- {shot.label()}")
        return outcome

    async def send(self, shot: Shot) -> Outcome:
        if shot.way == "stream":
            return await self.clients.grpc.stream(shot.payload, LIMIT_S, shot.cancel_after)
        if shot.way == "grpc":
            return await self.clients.grpc.unary(shot.payload, LIMIT_S, shot.method, shot.leave_s)
        return await http_call(self.clients.http, shot.payload, LIMIT_S, shot.leave_s, shot.half_close)

    async def _controls(self) -> None:
        number = 0
        while self._running:
            await self._control(number)
            number += 1
            await asyncio.sleep(0.1)

    async def _control(self, number: int) -> None:
        ask = self._asks[number % len(self._asks)]
        for _attempt in range(60):
            outcome = await ask.send(self.clients.grpc, self.clients.http, LIMIT_S)
            if outcome.kind != "error" or "try again" not in outcome.text:
                break
            await asyncio.sleep(0.25)
        self.result.controls += 1
        self.result.controls_slowest_s = max(self.result.controls_slowest_s, outcome.end - outcome.start)
        if outcome.kind != "answer":
            self.result.violations.append(
                f"control {ask.name}: {outcome.kind} {outcome.code} {outcome.text[:200]}"
            )
        elif ask.digest(outcome) != self._reference[ask.name]:
            self.result.controls_wrong.append(ask.name)


# ---------------------------------------------------------------- what aborts Triton itself


#: requests that abort Triton 2.51, whatever stands behind it; `serve` has to bring the server back
LETHAL = {
    "a JSON shape beyond memory": http_request(
        "/v2/models/postprocessing/infer",
        b'{"inputs": [{"name":"TOKENS_BATCH","datatype":"UINT32", "shape": [1099511627776], "data": [1]}]}',
    ),
    "JSON nested 200,000 deep": http_request(
        "/v2/models/postprocessing/infer", b'{"inputs": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    ),
}
BACK_S = 40.0


@dataclass
class LethalRow:
    name: str
    ended: str
    back_s: float
    complaint: str = ""


def send_lethal(service: Service) -> list[LethalRow]:
    """Each lethal request once: how it ended, and how long until the controls are answered again."""
    rows = []
    with contextlib.closing(Clients(service.grpc, service.http)) as clients:
        reference = clients.digests(controls())
    for name, payload in LETHAL.items():
        with contextlib.closing(Clients(service.grpc, service.http)) as clients:
            outcome = clients.loop.run(http_call(clients.http, payload, 10.0))
        start = time.monotonic()
        complaint = "the server is not back"
        while time.monotonic() - start < BACK_S and not service.ended():
            if service.server.ready():
                with contextlib.closing(Clients(service.grpc, service.http)) as clients:
                    try:
                        same = clients.digests(controls(), attempts=160) == reference
                    except AssertionError as error:
                        complaint = str(error)
                        continue
                complaint = "" if same else "controls changed"
                break
            time.sleep(0.2)
        if service.ended():
            complaint = "serve ended: " + service.log().splitlines()[-1]
        ended = f"{outcome.kind} {outcome.code} {outcome.text[:60]}".strip()
        rows.append(LethalRow(name, ended, time.monotonic() - start, complaint))
        if complaint:
            break
    return rows


def lethal_table(rows: Sequence[LethalRow]) -> str:
    cells = [[row.name, row.ended, f"{row.back_s:.1f}", row.complaint or "ok"] for row in rows]
    return table(
        ["request that aborts Triton 2.51", "what its client got", "controls back s", "verdict"], cells
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--index", type=int, action="append", default=[], help="send only these")
    parser.add_argument("--lethal", action="store_true", help="send only what aborts Triton 2.51")
    contracts = ",".join(SERVED)
    parser.add_argument(
        "--contracts", default=contracts, help=f"served, the controls' among them: {contracts}"
    )
    arguments = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="tdrelrepo") as folder:
        service = Service(build_repository(Path(folder), contracts=arguments.contracts.split(",")))
        try:
            if arguments.lethal:
                print(lethal_table(send_lethal(service)))
                return
            with contextlib.closing(Clients(service.grpc, service.http)) as clients:
                fuzzer = Fuzzer(service, clients, arguments.seed)
                for index in arguments.index:
                    shot = fuzzer.drawer.draw(index)
                    outcome = clients.loop.run(fuzzer.one(shot))
                    print(shot.label(), "->", outcome.kind, outcome.code, outcome.text, outcome.outputs)
                    print(shot.payload[:2000])
                if not arguments.index:
                    fuzzer.run(arguments.count, 60 * arguments.minutes)
                    print(fuzzer.result.table())
                print(*fuzzer.result.complaints(), *fuzzer.result.violations[:60], sep="\n")
            print("after stop:", service.stop() or "nothing left")
        finally:
            service.close()


if __name__ == "__main__":
    main()
