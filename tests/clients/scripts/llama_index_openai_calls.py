"""LlamaIndex's OpenAILike: URL MODEL PROMPT TOKENS WAY."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, model, prompt, tokens, way = sys.argv[1:]
settings = {"api_base": url, "api_key": "none", "model": model, "temperature": 0, "max_tokens": int(tokens)}
llm = OpenAILike(is_chat_model="chat" in way, max_retries=0, context_window=2048, **settings)
messages = [ChatMessage(role="user", content=prompt)]
calls = {
    "complete": lambda: llm.complete(prompt).text,
    "stream_complete": lambda: "".join(chunk.delta for chunk in llm.stream_complete(prompt)),
    "chat": lambda: llm.chat(messages).message.content,
    "stream_chat": lambda: "".join(chunk.delta or "" for chunk in llm.stream_chat(messages)),
}
print("ANSWER", json.dumps(calls[way]()))
