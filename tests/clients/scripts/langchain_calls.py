"""LangChain's TritonTensorRTLLM: HTTP GRPC MODEL PROMPT TOKENS WAY."""

import json
import sys

from langchain_nvidia_trt.llms import TritonTensorRTLLM

_http, grpc, model, prompt, tokens, way = sys.argv[1:]
llm = TritonTensorRTLLM(server_url=grpc, model_name=model, tokens=int(tokens))
answer = "".join(llm.stream(prompt)) if way == "stream" else llm.invoke(prompt)
print("ANSWER", json.dumps(answer))
