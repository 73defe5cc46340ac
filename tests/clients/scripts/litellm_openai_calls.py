"""LiteLLM's OpenAI-compatible providers: URL MODEL PROMPT TOKENS WAY."""

import json
import sys

import litellm

url, model, prompt, tokens, way = sys.argv[1:]
settings = {"api_base": url, "api_key": "none", "max_tokens": int(tokens), "temperature": 0, "num_retries": 0}
if way == "text_completion":
    found = litellm.text_completion(model=f"text-completion-openai/{model}", prompt=prompt, **settings)
    answer = found.choices[0].text
else:
    settings.update(model=f"hosted_vllm/{model}" if "hosted_vllm" in way else f"openai/{model}")
    settings.update(messages=[{"role": "user", "content": prompt}])
    if way.endswith("stream"):
        chunks = litellm.completion(stream=True, stream_options={"include_usage": True}, **settings)
        answer = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    else:
        answer = litellm.completion(**settings).choices[0].message.content
print("ANSWER", json.dumps(answer))
