"""The public programs that `make clients` runs, and how: an entry is a row of docs/guides/clients.md."""

from __future__ import annotations

from dataclasses import replace

from tests.clients.openai_programs import OPENAI_PROGRAMS
from tests.clients.program import (
    BLS,
    FT,
    FT_STREAM,
    LLMAPI,
    PLAIN,
    UNBATCHED,
    VLLM,
    Program,
    calls,
)

TRITONCLIENT = calls(
    "tritonclient",
    "tritonclient_calls.py",
    "tritonclient",
    {
        "http.infer": PLAIN,
        "http.async_infer": PLAIN,
        "http.aio.infer": PLAIN,
        "grpc.infer": PLAIN,
        "grpc.async_infer": PLAIN,
        "grpc.aio.infer": PLAIN,
        "grpc.async_stream_infer": BLS,
        "grpc.aio.stream_infer": BLS,
    },
)
PYTRITON = calls(
    "pytriton's clients",
    "pytriton_calls.py",
    "pytriton",
    {
        "ModelClient, HTTP": PLAIN,
        "ModelClient, gRPC": PLAIN,
        "FuturesModelClient": PLAIN,
        "AsyncioModelClient": PLAIN,
        "DecoupledModelClient": BLS,
        "AsyncioDecoupledModelClient": BLS,
    },
)
LIBRARIES = [
    *calls("LiteLLM", "litellm_calls.py", "litellm", {"completion": BLS, "stream": BLS}),
    *calls("LiteLLM", "litellm_calls.py", "litellm", {"infer": UNBATCHED}, options=("--unbatched-text",)),
    *calls(
        "LlamaIndex NvidiaTriton",
        "llama_index_calls.py",
        "llama-index",
        {"complete": BLS, "stream_complete": BLS},
    ),
    replace(  # it writes the messages into a prompt of its own, so that the answer is another
        *calls("LlamaIndex NvidiaTriton", "llama_index_calls.py", "llama-index", {"chat": BLS}),
        answers=False,
        shows=r'ANSWER "[^"]',
    ),
    *calls(
        "LangChain TritonTensorRTLLM",
        "langchain_calls.py",
        "langchain",
        {"invoke": BLS, "stream": BLS},
        limit_s=45.0,  # after an error on its stream it never ends
        options=("--uint32-text-inputs",),
        flag="`langchain-core<0.3`",
    ),
    replace(
        *calls("LangChain TritonTensorRTLLM", "langchain_calls.py", "langchain-newest", {"invoke": BLS}),
        use="`invoke`, newest LangChain",
        why="ModuleNotFoundError: No module named 'langchain_core.pydantic_v1'",
    ),
]

_CURL = ("curl", "-sN", "--fail-with-body", "--max-time", "60")
HTTP = [
    Program(
        "curl",
        "`/generate`",
        (*_CURL, "http://{http}/v2/models/{model}/generate", "-d")
        + ('{{"text_input": "{prompt}", "max_tokens": {tokens}}}',),
        shows='"text_output":"{prompt}',
    ),
    Program(
        "curl",
        "`/generate_stream`",
        (*_CURL, "http://{http}/v2/models/{model}/generate_stream", "-d")
        + ('{{"text_input": "{prompt}", "max_tokens": {tokens}, "stream": true}}',),
        shows="(?s)(data: .*){8}",
        never='"error"',
    ),
]

_LOAD = ("--concurrency-range", "4", "--request-count", "20")


def _perf(use: str, model: str, protocol: str, data: str, *options: str, **fields: object) -> Program:
    command = ("{perf_analyzer}", "-m", model, "-i", protocol, "-u", f"{{{protocol}}}")
    given = ("--input-data", "{data}/" + data) if data else ()
    return Program(
        "perf_analyzer",
        use,
        (*command, *given, *options, *_LOAD),
        "tritonclient",
        model,
        **{"shows": r"Request count: [1-9]", "never": "(?i)failed to|error:", **fields},
    )


#: the tokenizer that genai-perf gets is in the model preprocessing
_VLLM = ("--contract", "fastertransformer,tensorrt_llm,vllm")
_LLMAPI = ("--contract", "tensorrt_llm,llmapi")
_STREAM = ("--streaming", "--async")
PERF_ANALYZER = [
    _perf("text, HTTP", PLAIN, "http", "text.json"),
    _perf("text, gRPC", PLAIN, "grpc", "text.json"),
    _perf("`ensemble`", "ensemble", "grpc", "ensemble.json"),
    _perf("token ids", FT, "grpc", "ids.json"),
    _perf("text, `--streaming`", BLS, "grpc", "stream.json", *_STREAM),
    _perf("`ensemble_streaming`, `--streaming`", "ensemble_streaming", "grpc", "ensemble.json", *_STREAM),
    _perf("token ids, `--streaming`", FT_STREAM, "grpc", "ids.json", *_STREAM),
    _perf("vLLM's contract, `--streaming`", VLLM, "grpc", "vllm.json", *_STREAM, options=_VLLM),
    _perf(
        "random inputs, no `--input-data`",
        PLAIN,
        "grpc",
        "",
        "--shape",
        "text_input:1",
        "--shape",
        "max_tokens:1",
        why="perf_analyzer wants a shape for each optional input and fills all with random values: "
        "give `--input-data`",
    ),
]

_GENAI = ("{bin}/genai-perf", "profile", "-m", "{model}", "--tokenizer", "{tokenizer}", "--isl", "20")
_GENAI_LOAD = ("--osl", "16", "--concurrency", "2", "--request-count", "6")
_ARTIFACTS = ("--artifact-dir", "{work}/artifacts")


def _genai(use: str, model: str, *options: str, **fields: object) -> Program:
    return Program(
        "genai-perf",
        use,
        (*_GENAI, *options, *_GENAI_LOAD, *_ARTIFACTS),
        "genai-perf",
        model,
        shows=r"Request (Count|Latency)",
        never="Traceback|ERROR",
        limit_s=180.0,
        **fields,
    )


GENAI_PERF = [
    _genai(
        "`--backend tensorrtllm --streaming`", BLS, "--backend", "tensorrtllm", "--streaming", "-u", "{grpc}"
    ),
    _genai("`--backend tensorrtllm`", PLAIN, "--backend", "tensorrtllm", "-u", "{grpc}"),
    _genai(
        "`--endpoint-type generate --streaming`",
        BLS,
        *("--endpoint-type", "generate", "--streaming", "-u", "{http}"),
        *("--endpoint", "v2/models/{model}/generate_stream"),
    ),
    _genai(
        "`--endpoint-type generate`",
        BLS,
        *("--endpoint-type", "generate", "-u", "{http}", "--endpoint", "v2/models/{model}/generate"),
    ),
    _genai(
        "`--backend vllm --streaming`",
        VLLM,
        *("--backend", "vllm", "--streaming", "-u", "{grpc}"),
        options=_VLLM,
    ),
    _genai("`--backend vllm`", f"{VLLM}_plain", "--backend", "vllm", "-u", "{grpc}", options=_VLLM),
]


def _aiperf(use: str, *options: str, **fields: object) -> Program:
    command = (
        "{bin}/aiperf",
        "profile",
        "-m",
        "{model}",
        "-u",
        "http://{http}",
        "--tokenizer",
        "{tokenizer}",
    )
    load = ("--concurrency", "2", "--request-count", "6", "--synthetic-input-tokens-mean", "20")
    tail = ("--output-tokens-mean", "16", "--artifact-dir", "{work}/artifacts", "--ui", "none")
    return Program(
        "AIPerf",
        use,
        (*command, *options, *load, *tail),
        "aiperf",
        shows=r"Request Count",
        never="Traceback|Error Summary",
        limit_s=180.0,
        **fields,
    )


_TEMPLATE = ("--endpoint-type", "template", "--extra-inputs", "payload_template:{data}/payload.jinja")
_FIELD = ("--extra-inputs", "response_field:text_output", "--custom-endpoint")
AIPERF = [
    _aiperf(
        "`template`, `/generate_stream`",
        *(*_TEMPLATE, *_FIELD, "/v2/models/{model}/generate_stream", "--streaming"),
    ),
    _aiperf("`template`, `/generate`", *_TEMPLATE, *_FIELD, "/v2/models/{model}/generate"),
]


def _program(
    name: str,
    use: str,
    source: str,
    *arguments: str,
    recorded: tuple[tuple[str, str], ...] = (),
    **fields: object,
) -> Program:
    """A program that comes as source alone; without one its requests are sent."""
    given = {"environment": "programs", "never": "Traceback", "limit_s": 150.0, **fields}
    command = ("{python}", "{source}", *arguments) if source else ()
    return Program(name, use, command, source=source, recorded=recorded, **given)


_FT = "fastertransformer_backend/tools/"
_FT_NAME = "FasterTransformer"
_IDENTITY = (("FasterTransformer identity_test.py", FT),)
_PASSED = r"execution time: \d"
FASTERTRANSFORMER = [
    _program(
        _FT_NAME,
        "`identity_test.py`, gRPC",
        _FT + "identity_test.py",
        *("-i", "grpc", "-u", "{grpc}", "-o", "8", "-n", "1"),
        recorded=_IDENTITY,
        model=FT,
        shows=_PASSED,
    ),
    _program(
        _FT_NAME,
        "`gpt/identity_test.py`, HTTP",
        _FT + "gpt/identity_test.py",
        *("-i", "http", "-u", "{http}", "-o", "8", "-n", "1"),
        recorded=_IDENTITY,
        model=FT,
        shows=_PASSED,
    ),
    _program(
        _FT_NAME,
        "`gpt/identity_test.py -d`, streams",
        _FT + "gpt/identity_test.py",
        *("-i", "grpc", "-u", "{grpc}", "-d", "-b", "8", "-o", "8", "-n", "1"),
        recorded=(("FasterTransformer gpt/identity_test.py -d", FT),),
        model=FT,
        shows=_PASSED,
        never="Traceback|InferenceServerException|error",
        options=("--decoupled-fastertransformer",),
    ),
    _program(
        _FT_NAME,
        "`gpt/identity_test.py -beam 2`",
        _FT + "gpt/identity_test.py",
        *("-i", "grpc", "-u", "{grpc}", "-o", "8", "-n", "1", "-beam", "2"),
        recorded=(("FasterTransformer identity_test.py -beam 2", FT),),
        model=FT,
        shows=_PASSED,
    ),
    _program(
        _FT_NAME,
        "`gpt/end_to_end_test.py`",
        _FT + "gpt/end_to_end_test.py",
        *("-i", "http", "-u", "{http}", "--return_log_probs"),
        recorded=(
            ("FasterTransformer end_to_end_test.py, preprocessing", "preprocessing"),
            ("FasterTransformer end_to_end_test.py, ensemble", "ensemble"),
        ),
        model="ensemble",
    ),
    _program(
        _FT_NAME,
        "`issue_request.py`",
        _FT + "issue_request.py",
        *("{requests}/sample_request.json", "--params", '{{"config": {{"url": "{http}"}}}}'),
        recorded=_IDENTITY,
        model=FT,
        shows="output_ids",
    ),
    _program(
        _FT_NAME,
        "`issue_request.py`, `ensemble`",
        _FT + "issue_request.py",
        *("{requests}/sample_request_ensemble.json", "--params", '{{"config": {{"url": "{http}"}}}}'),
        recorded=(("FasterTransformer end_to_end_test.py, ensemble", "ensemble"),),
        model="ensemble",
        shows="OUTPUT_0",
    ),
    _program(
        _FT_NAME,
        "`issue_request.py`, streams",
        _FT + "issue_request.py",
        *("{requests}/sample_request_stream.json", "--params", '{{"config": {{"url": "{grpc}"}}}}'),
        recorded=(("FasterTransformer issue_request.py, sample_request_stream.json", FT_STREAM),),
        model=FT_STREAM,
        never="Traceback|INTERNAL|UNIMPLEMENTED",
    ),
    _program(
        _FT_NAME,
        "`gpt/evaluate_lambada.py`",
        _FT + "gpt/evaluate_lambada.py",
        *("--model-variant", "bloom", "--tokenizer-name-or-path", "{tokenizer}", "-d", "{data}", "-b", "2"),
        *("-i", "grpc", "-u", "{grpc}", "-o", "{work}/lambada.csv"),
        recorded=_IDENTITY,
        model=FT,
        shows=r"last token accuracy: +\d",
    ),
    _program(
        _FT_NAME,
        "`interactive_text_generation/identity_test.py`",
        _FT + "interactive_text_generation/identity_test.py",
        *("-i", "grpc", "-u", "{grpc}", "-o", "8", "-n", "1", "--session_id", "1"),
        recorded=(("FasterTransformer interactive_text_generation/identity_test.py", FT),),
        model=FT,
        shows=_PASSED,
        options=("--contract", "interactive,tensorrt_llm"),
    ),
    _program(
        _FT_NAME,
        "`gpt/gpt_prompt_learning_squad_task_identity_test.py`",
        "",
        recorded=(("FasterTransformer prompt learning", FT),),
        model=FT,
        why="the model of this check has no tasks of prompt learning (docs/guides/prompt_learning.md)",
    ),
    _program(
        _FT_NAME,
        "BERT's and T5's tests",
        "",
        recorded=(("FasterTransformer bert/identity_test.py", FT),),
        model=FT,
        why="other families than GPT: encoders are not served",
    ),
]

_TRT = "tensorrtllm_backend/"
_TRT_NAME = "TensorRT-LLM"
_IDS = ("--contract", "tensorrt_llm,tensorrt_llm_tokens")
_IDS_CLIENT = _TRT + "inflight_batcher_llm/client/inflight_batcher_llm_client.py"
_IDS_ARGUMENTS = ("-u", "{grpc}", "--tokenizer-dir", "{tokenizer}", "--text", "{prompt}")
_GRPC_CLIENT = _TRT + "inflight_batcher_llm/client/end_to_end_grpc_client.py"
_GRPC_ARGUMENTS = ("-u", "{grpc}", "-o", "{tokens}", "--model-name")
TENSORRT_LLM = [
    _program(
        _TRT_NAME,
        "`end_to_end_grpc_client.py --streaming`",
        _GRPC_CLIENT,
        *(*_GRPC_ARGUMENTS, BLS, "-p", "{prompt}", "--streaming", "-v"),
        recorded=(("TensorRT-LLM end_to_end_grpc_client.py --streaming", BLS),),
        shows="{answer}",
        never="Received an error|Traceback",
    ),
    _program(
        _TRT_NAME,
        "`end_to_end_grpc_client.py`",
        _GRPC_CLIENT,
        *(*_GRPC_ARGUMENTS, BLS, "-p", "{prompt}", "-v"),
        recorded=(("TensorRT-LLM end_to_end_grpc_client.py", BLS),),
        shows="{answer}",
        never="Received an error|Traceback",
    ),
    _program(
        _TRT_NAME,
        "`end_to_end_grpc_client.py --batch-inputs`",
        _GRPC_CLIENT,
        *(*_GRPC_ARGUMENTS, BLS, "--batch-inputs", "-v"),
        *("-p", '["{prompt}", "Once upon a time", "My name is"]'),
        recorded=(("TensorRT-LLM end_to_end_grpc_client.py --batch-inputs", BLS),),
        shows=r"(?s)(?=.*0: {prompt})(?=.*1: Once upon)(?=.*2: My name)",
        never="Received an error|Traceback",
    ),
    _program(
        _TRT_NAME,
        "`end_to_end_grpc_client.py`, its default model `ensemble`",
        _GRPC_CLIENT,
        *(*_GRPC_ARGUMENTS, "ensemble", "-p", "{prompt}", "--streaming", "-v"),
        recorded=(("TensorRT-LLM end_to_end_grpc_client.py --streaming", "ensemble"),),
        model="ensemble",
        shows="{answer}",
        never="Received an error|Traceback",
        options=("--ensemble-owner", "tensorrt_llm"),
    ),
    _program(
        _TRT_NAME,
        "`end_to_end_grpc_client.py --beam-width 2`",
        _GRPC_CLIENT,
        *(*_GRPC_ARGUMENTS, BLS, "-p", "{prompt}", "--beam-width", "2", "-v"),
        recorded=(("TensorRT-LLM end_to_end_grpc_client.py --beam-width 2", BLS),),
        shows="{beams}",
        never="Received an error|Traceback",
    ),
    _program(
        _TRT_NAME,
        "`end_to_end_grpc_client.py --return-context-logits`",
        _GRPC_CLIENT,
        *(*_GRPC_ARGUMENTS, BLS, "-p", "{prompt}", "--return-context-logits", "-v"),
        recorded=(("TensorRT-LLM end_to_end_grpc_client.py --return-context-logits", BLS),),
        shows="context_logits.shape",
        never="Received an error|Traceback",
    ),
    _program(
        _TRT_NAME,
        "`inflight_batcher_llm_client.py`",
        _IDS_CLIENT,
        *_IDS_ARGUMENTS,
        recorded=(("TensorRT-LLM inflight_batcher_llm_client.py", "tensorrt_llm"),),
        model="tensorrt_llm",
        shows="Output beam 0: +{answer}",
        never="Received an error|Traceback",
        options=_IDS,
    ),
    _program(
        _TRT_NAME,
        "`inflight_batcher_llm_client.py --streaming`",
        _IDS_CLIENT,
        *(*_IDS_ARGUMENTS, "--streaming", "--exclude-input-in-output"),
        recorded=(("TensorRT-LLM inflight_batcher_llm_client.py --streaming", "tensorrt_llm"),),
        model="tensorrt_llm",
        shows="Output beam 0: +{answer}",
        never="Received an error|Traceback",
        options=(*_IDS, "--decoupled", "tensorrt_llm_tokens"),
    ),
    _program(
        _TRT_NAME,
        "`inflight_batcher_llm_client.py --stop-after-ms`",
        _IDS_CLIENT,
        *(*_IDS_ARGUMENTS, "--request-output-len", "400", "--stop-after-ms", "300", "--request-id", "1"),
        recorded=(("TensorRT-LLM inflight_batcher_llm_client.py", "tensorrt_llm"),),
        model="tensorrt_llm",
        shows="Got cancellation response from server",
        never="Received an error|Traceback|AssertionError",
        options=_IDS,
    ),
    _program(
        _TRT_NAME,
        "`benchmark_core_model.py dataset`",
        _TRT + "tools/inflight_batcher_llm/benchmark_core_model.py",
        *("-i", "grpc", "-u", "{grpc}", "--max-input-len", "100", "--num-requests", "8"),
        *("dataset", "--dataset", "{data}/dataset.json", "--tokenizer-dir", "{tokenizer}"),
        recorded=(("TensorRT-LLM benchmark_core_model.py", "tensorrt_llm"),),
        model="tensorrt_llm",
        shows=r"Total requests +\| +4\.00",
        never="Traceback|Failed",
        options=_IDS,
        limit_s=300.0,
    ),
    _program(
        _TRT_NAME,
        "`benchmark_core_model.py token-norm-dist`",
        _TRT + "tools/inflight_batcher_llm/benchmark_core_model.py",
        *("-i", "grpc", "-u", "{grpc}", "--max-input-len", "100", "--num-requests", "8", "token-norm-dist"),
        *("--input-mean", "20", "--input-stdev", "3", "--output-mean", "8", "--output-stdev", "2"),
        recorded=(("TensorRT-LLM benchmark_core_model.py token-norm-dist", "tensorrt_llm"),),
        model="tensorrt_llm",
        shows=r"Total requests +\| +8\.00",
        never="Traceback|Failed",
        options=(*_IDS, "--wrap-token-ids"),
        limit_s=300.0,
    ),
    _program(
        _TRT_NAME,
        "`gpt/client.py`",
        _TRT + "tools/gpt/client.py",
        *("-i", "grpc", "-u", "{grpc}", "--tokenizer_dir", "{tokenizer}"),
        *("--text", "{prompt}", "--output_len", "{tokens}"),
        recorded=(("TensorRT-LLM gpt/client.py", "tensorrt_llm"),),
        model="tensorrt_llm",
        shows="Output: +{answer}",
        options=_IDS,
    ),
    _program(
        _TRT_NAME,
        "`end_to_end_test.py --test-bls`",
        _TRT + "tools/inflight_batcher_llm/end_to_end_test.py",
        *("-i", "grpc", "-u", "{grpc}", "--max-input-len", "100", "--dataset", "{data}/dataset.json"),
        *("--return-log-probs", "--test-bls"),
        recorded=(("TensorRT-LLM end_to_end_test.py, preprocessing", "preprocessing"),),
        model="preprocessing",
        shows=r"(?s)Functionality test succeed.*Total Latency",
        options=(*_IDS, "--plain-text"),
    ),
    _program(
        _TRT_NAME,
        "`end_to_end_test.py --test-llmapi`",
        _TRT + "tools/inflight_batcher_llm/end_to_end_test.py",
        *("-i", "grpc", "-u", "{grpc}", "--max-input-len", "100", "--dataset", "{data}/dataset.json"),
        *("--test-llmapi", "--model-name", LLMAPI),
        recorded=(("TensorRT-LLM llmapi", LLMAPI),),
        model=LLMAPI,
        shows=r"(?s)Functionality test succeeded.*Total Latency",
        options=_LLMAPI,
    ),
]

OTHERS = [
    _program(
        "vLLM backend",
        "`samples/client.py`",
        "vllm_backend/samples/client.py",
        *("-u", "{grpc}", "--input-prompts", "{data}/prompts.txt", "-s"),
        *("--exclude-inputs-in-outputs", "--results-file", "{work}/results.txt"),
        recorded=(("vLLM backend client.py", VLLM),),
        model=VLLM,
        shows="PASS",
        options=_VLLM,
    ),
    _program(
        "Triton CLI",
        "`triton infer`",
        "triton_cli/src/triton_cli/main.py",
        *("--verbose", "infer", "-m", BLS, "--prompt", "{prompt}", "-u", "127.0.0.1", "-p", "{grpc_port}"),
        recorded=(("Triton CLI infer", BLS),),
        environment="triton-cli",
        shows="text_output",
    ),
    Program(
        "Triton's OpenAI front end",
        "`--backend triton`",
        recorded=(("OpenAI front end", BLS),),
        flag="not on PyPI, wants Triton's in-process API",
    ),
    Program(
        "Triton's OpenAI front end",
        "`--backend vllm`",
        recorded=(("OpenAI front end --backend vllm", VLLM),),
        model=VLLM,
        options=_VLLM,
        flag="not on PyPI, wants Triton's in-process API",
    ),
]

PROGRAMS = [
    *HTTP,
    *TRITONCLIENT,
    *PYTRITON,
    *PERF_ANALYZER,
    *GENAI_PERF,
    *AIPERF,
    *LIBRARIES,
    *FASTERTRANSFORMER,
    *TENSORRT_LLM,
    *OTHERS,
    *OPENAI_PROGRAMS,
]
