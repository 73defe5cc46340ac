"""Clients of the OpenAI service that `make clients` runs, unmodified."""

from __future__ import annotations

from tests.clients.program import Program

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LAMBADA_ITEMS = 100
#: a call that the service has read, with the city of the question in its arguments
_PARIS = r'ANSWER "[^"]*Paris'


def _ways(
    name: str, script: str, environment: str, ways: dict[str, str], url: str = "{openai}", **common: object
) -> list[Program]:
    """Programs of one script of ours that calls a library: way -> route."""
    command = ("{python}", "{scripts}/" + script, url, "{model}", "{prompt}", "{tokens}")
    return [
        Program(name, f"`{way}`", (*command, way), environment, route=route, **{"answers": True, **common})
        for way, route in ways.items()
    ]


OPENAI = _ways(
    "openai (Python)",
    "openai_calls.py",
    "openai",
    {
        "completions": COMPLETIONS,
        "completions, stream": COMPLETIONS,
        "models, errors, raw response": COMPLETIONS,
        "chat": CHAT,
        "chat, stream": CHAT,
        "AsyncOpenAI": CHAT,
    },
)
_NODE = ("node", "{scripts}/openai_calls.cjs", "{folder}", "{openai}", "{model}", "{prompt}", "{tokens}")
#: its answer is read from JSON of a schema, so it is not a text of the server
_FORM: dict[str, object] = {"answers": False, "shows": _PARIS}
OPENAI += _ways("openai (Python)", "openai_calls.py", "openai", {"parse": CHAT}, **_FORM)
OPENAI_NODE = [
    Program("openai (npm)", f"`{way}`", (*_NODE, way), "openai-npm", route=route, answers=True)
    for way, route in {
        "completions": COMPLETIONS,
        "completions, stream": COMPLETIONS,
        "chat": CHAT,
        "chat, stream": CHAT,
    }.items()
]

#: tools=... : its answer is read from a call, so it is not a text of the server
_TOOLS = {"url": "{tools}", **_FORM}
_LANGCHAIN = ("LangChain ChatOpenAI", "langchain_openai_calls.py", "langchain-openai")
_PYDANTIC = ("pydantic-ai", "pydantic_ai_calls.py", "pydantic-ai")
LIBRARIES = [
    *_ways("LangChain OpenAI", *_LANGCHAIN[1:], {"OpenAI.invoke": COMPLETIONS, "OpenAI.stream": COMPLETIONS}),
    *_ways(*_LANGCHAIN, {"invoke": CHAT, "astream": CHAT}),
    *_ways(*_LANGCHAIN, {"bind_tools": CHAT}, **_TOOLS),
    *_ways(*_LANGCHAIN, {"with_structured_output": CHAT}, **_FORM),
    *_ways(
        "LlamaIndex OpenAILike",
        "llama_index_openai_calls.py",
        "llama-index-openai",
        {"complete": COMPLETIONS, "stream_complete": COMPLETIONS, "chat": CHAT, "stream_chat": CHAT},
    ),
    *_ways(
        "LiteLLM",
        "litellm_openai_calls.py",
        "litellm",
        {
            "text_completion": COMPLETIONS,
            "openai/": CHAT,
            "openai/, stream": CHAT,
            "hosted_vllm/, stream": CHAT,
        },
    ),
    *_ways("instructor", "instructor_calls.py", "instructor", {"TOOLS": CHAT}, **_TOOLS),
    *_ways("instructor", "instructor_calls.py", "instructor", {"JSON_SCHEMA": CHAT}, **_FORM),
    *_ways(*_PYDANTIC, {"run_sync": CHAT, "run_stream": CHAT}),
    *_ways(*_PYDANTIC, {"output_type": CHAT}, **_TOOLS),
    *_ways(*_PYDANTIC, {"NativeOutput": CHAT}, **_FORM),
]

#: --endpoint-type, route, whether answers stream
_MEASURED_WAYS = (("chat", CHAT, True), ("chat", CHAT, False), ("completions", COMPLETIONS, True))
_LOAD = ("--concurrency", "2", "--request-count", "6")
_MEASURED = [
    Program(
        "genai-perf",
        f"`--endpoint-type {kind}{' --streaming' if streaming else ''}`",
        (
            *("{bin}/genai-perf", "profile", "-m", "{model}", "--tokenizer", "{tokenizer}", "--isl", "20"),
            *("--endpoint-type", kind, *(("--streaming",) if streaming else ()), "-u", "{front}"),
            *("--osl", "16", *_LOAD, "--artifact-dir", "{work}/artifacts"),
        ),
        "genai-perf",
        route=route,
        shows=r"Request Count\D+6\.00",
        never="Traceback|ERROR",
        limit_s=240.0,
    )
    for kind, route, streaming in _MEASURED_WAYS
] + [
    Program(
        "AIPerf",
        f"`--endpoint-type {kind}{' --streaming' if streaming else ''}`",
        (
            *(
                "{bin}/aiperf",
                "profile",
                "-m",
                "{model}",
                "-u",
                "http://{front}",
                "--tokenizer",
                "{tokenizer}",
            ),
            *("--endpoint-type", kind, *(("--streaming",) if streaming else ())),
            *(*_LOAD, "--synthetic-input-tokens-mean", "20", "--output-tokens-mean", "16"),
            *("--artifact-dir", "{work}/artifacts", "--ui", "none"),
        ),
        "aiperf",
        route=route,
        shows=r"Request Count\D+6[.,]",
        never="Traceback|Error Summary",
        limit_s=240.0,
    )
    for kind, route, streaming in _MEASURED_WAYS
]
GUIDELLM = [
    Program(
        "guidellm",
        f"`run`, {route}",
        (
            *("{bin}/guidellm", "run", "--profile", "kind=synchronous", "--disable-progress"),
            *(
                "--backend",
                f"kind=openai_http,target=http://{{front}},model={{model}},request_format={route}",
            ),
            *("--constraint", "kind=max_requests,count=4"),
            *("--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=16"),
            *("--tokenizer", "kind=huggingface_auto,model={tokenizer}"),
            *("--output", "kind=console", "--output", "kind=json,path={work}/report.json"),
        ),
        "guidellm",
        route=route,
        shows=r"\| 4 +\| 0 +\| 0 +\|",  # completed, incomplete, failed
        never="Traceback",
        limit_s=240.0,
    )
    for route in (CHAT, COMPLETIONS)
]
LM_EVAL = [
    Program(
        "lm-eval",
        "`local-completions`, LAMBADA",
        (
            *("{python}", "{scripts}/lm_eval_lambada.py", "{openai}", "{model}", "{tokenizer}"),
            *("{lambada_file}", str(LAMBADA_ITEMS), "{lambada}", "{work}"),
        ),
        "lm-eval",
        route=COMPLETIONS,
        shows=r"SAME \d",
        limit_s=480.0,
    )
]

OPENAI_PROGRAMS = [*OPENAI, *OPENAI_NODE, *LIBRARIES, *LM_EVAL, *_MEASURED, *GUIDELLM]
