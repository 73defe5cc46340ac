"""LiteLLM's completion: HTTP GRPC MODEL PROMPT TOKENS WAY."""

import json
import sys

import litellm

http, _grpc, model, prompt, tokens, way = sys.argv[1:]
path = "infer" if way == "infer" else "generate"
settings = {
    "model": f"triton/{model}",
    "messages": [{"role": "user", "content": prompt}],
    "api_base": f"http://{http}/v2/models/{model}/{path}",
    "max_tokens": int(tokens),
}
if way == "stream":
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**settings, stream=True)]
    answer = "".join(pieces)
else:
    answer = litellm.completion(**settings).choices[0].message.content
print("ANSWER", json.dumps(answer))
