"""The settings of the front: from the command line or config.pbtxt, handed to each worker as JSON."""

from __future__ import annotations

import msgspec

LOOPBACK = "127.0.0.1"
#: of one request's body. Token ids need up to 8 bytes each, and texts have limits of their own.
MAX_BODY_BYTES = 32 << 20
#: of one worker; an idle one costs some 20 KB
MAX_CONNECTIONS = 10_000
#: of the folder of files and batches, results included
MAX_STORE_BYTES, MAX_STORE_FILES = 10 << 30, 1000


class FrontSettings(msgspec.Struct, frozen=True, kw_only=True):
    """engine_dir: the model folder whose config.pbtxt is the engine's; num_engines: of that model.

    triton: HOST:PORT of the gRPC of servers whose engines are used instead; (): this machine's are used.
    triton_tls: whether that gRPC is encrypted. triton_ca: its authorities, a file in PEM; "": those of gRPC.
    triton_cert, triton_key: files in PEM with this client's certificate and its key, "": none.
    vocab_size: of the weights in the repository; 0: it has none.
    names: of the served model, the first one is shown; (): its own name. chat_template: a file; "": the
    checkpoint's. tool_call_parser: name of the format of tool calls; "": the template's.
    cors: origins whose pages may call; "*": all. key_digests: SHA-256 of accepted keys, in
    hexadecimal; key_file: a file of such digests, read again when it changes; "": none. owner: "PID:START" of
    the process whose life the engine shares; guest: whether that process keeps the engine, not the front.
    lora_dir: folder of the adapters; "": the engine has none. manage_adapters: whether requests may add and
    remove some. batch_dir: folder of files and batches, absolute; "": neither exists. batch_dir_bytes,
    batch_max_files: its limits. add_special_tokens, stop_ids: as the text
    models of the repository have them.
    """

    engine_dir: str
    tokenizer_dir: str
    host: str = LOOPBACK
    port: int = 9000
    workers: int = 1
    num_engines: int = 1
    triton: tuple[str, ...] = ()
    triton_tls: bool = False
    triton_ca: str = ""
    triton_cert: str = ""
    triton_key: str = ""
    vocab_size: int = 0
    names: tuple[str, ...] = ()
    chat_template: str = ""
    tool_call_parser: str = ""
    cors: tuple[str, ...] = ()
    key_digests: tuple[str, ...] = ()
    key_file: str = ""
    owner: str = ""
    guest: bool = False
    lora_dir: str = ""
    manage_adapters: bool = False
    batch_dir: str = ""
    batch_dir_bytes: int = MAX_STORE_BYTES
    batch_max_files: int = MAX_STORE_FILES
    fingerprint: str = ""
    created: int = 0
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    stop_ids: tuple[int, ...] = ()
    resume_within_s: float = 60.0
    max_body_bytes: int = MAX_BODY_BYTES
    max_connections: int = MAX_CONNECTIONS  # of a worker
    max_prompt_bytes: int | None = None
    max_request_bytes: int | None = None
    #: seconds after which a connection is closed whose client does not read, or does not send its headers or
    #: its body; and one without a request
    stalled_s: float = 30.0
    headers_s: float = 10.0
    body_s: float = 60.0
    idle_s: float = 75.0
