"""A front end without Triton: python -m tests.backend.service.text_program ENGINE_DIR TOKENIZER_DIR

Reads requests from standard input, one JSON object per line, and answers each with one JSON object. It has
no Triton module, no torch and no transformers, and it cannot look up its parent process.
"""

from __future__ import annotations

import importlib.abc
import json
import os
import queue
import sys
from pathlib import Path
from typing import Any


class Absent(importlib.abc.MetaPathFinder):
    """Makes the import of modules fail that this process must not need."""

    names = ("triton_python_backend_utils", "torch", "transformers")

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name.split(".")[0] in self.names:
            raise ImportError(f"{name} was imported")


def no_parent() -> int:
    raise AssertionError("the parent process was looked up")


sys.meta_path.insert(0, Absent())
os.getppid = no_parent

from tridecode.backend.base.errors import TridecodeError  # noqa: E402
from tridecode.backend.service.engine_service import EngineService  # noqa: E402
from tridecode.backend.service.owner import Owner  # noqa: E402
from tridecode.backend.service.text_request import TextRequest  # noqa: E402
from tridecode.backend.service.text_service import TextService  # noqa: E402
from tridecode.backend.service.text_stream import TextStream  # noqa: E402
from tridecode.backend.service.text_tokenizer import TextTokenizer  # noqa: E402
from tridecode.backend.wire.sampling_params import SamplingParams  # noqa: E402


def main(engine_dir: str, tokenizer_dir: str) -> None:
    engine = EngineService.open(engine_dir, "program", Owner.this_process())
    try:
        engine.link.wait_ready(120)
        service = TextService(engine, TextTokenizer(Path(tokenizer_dir)))
        print(json.dumps({"pid": os.getpid()}), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(service, json.loads(line))), flush=True)
    finally:
        engine.close()


def answer(service: TextService, wanted: dict[str, Any]) -> dict[str, Any]:
    """Answer one request. wanted: prompt (text or ids) or messages; max_tokens, stop, whole, cancel_after
    (pieces)."""
    found: dict[str, Any] = {"pieces": [], "prompt_tokens": 0, "output_tokens": 0, "finish": ""}
    wakes: queue.SimpleQueue[TextStream] = queue.SimpleQueue()
    try:
        messages = wanted.get("messages")
        prompt = wanted["prompt"] if messages is None else service.render(messages)
        params = SamplingParams(max_tokens=wanted["max_tokens"])
        asked = TextRequest(
            prompts=[prompt],
            params=[params],
            stop_words=[tuple(wanted.get("stop", ()))],
            lora_names=[""],
            priorities=[0],
            streaming=not wanted.get("whole", False),
            exclude=True,
            add_special_tokens=messages is None,
        )
        stream = service.submit(asked, wakes.put, label="mine")
        while not stream.finished:
            for pieces in wakes.get(timeout=60).take():
                piece = pieces[0]
                found["pieces"].append(piece.text)
                found["prompt_tokens"] = piece.num_prompt_tokens
                found["output_tokens"] += piece.num_tokens
                found["finish"] = piece.finish_reason
                if len(found["pieces"]) == wanted.get("cancel_after"):
                    stream.cancel()
    except TridecodeError as error:
        found.update(code=error.code, error=str(error))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
