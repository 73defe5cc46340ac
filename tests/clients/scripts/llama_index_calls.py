"""LlamaIndex's NvidiaTriton: HTTP GRPC MODEL PROMPT TOKENS WAY."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.nvidia_triton import NvidiaTriton

_http, grpc, model, prompt, tokens, way = sys.argv[1:]
llm = NvidiaTriton(server_url=grpc, model_name=model, tokens=int(tokens))
if way == "stream_complete":
    answer = "".join(piece.delta or piece.text for piece in llm.stream_complete(prompt))
elif way == "chat":
    answer = llm.chat([ChatMessage(role="user", content=prompt)]).message.content
else:
    answer = llm.complete(prompt).text
print("ANSWER", json.dumps(answer))
