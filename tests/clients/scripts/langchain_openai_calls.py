"""LangChain's OpenAI and ChatOpenAI: URL MODEL PROMPT TOKENS WAY."""

import asyncio
import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

url, model, prompt, tokens, way = sys.argv[1:]
SETTINGS = {"base_url": url, "api_key": "none", "model": model, "temperature": 0, "max_retries": 0}


@tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


class Weather(BaseModel):
    """The place whose weather is wanted."""

    city: str


if way == "bind_tools":
    bound = ChatOpenAI(max_tokens=64, **SETTINGS).bind_tools([weather], tool_choice="weather")
    calls = bound.invoke("What is the weather in Paris?").tool_calls
    assert [call["name"] for call in calls] == ["weather"] and weather.invoke(calls[0]).content, calls
    answer = calls[0]["args"]["city"]
elif way == "with_structured_output":
    typed = ChatOpenAI(max_tokens=64, **SETTINGS).with_structured_output(Weather)
    answer = typed.invoke("What is the weather in Paris?").city
elif way.startswith("OpenAI"):
    llm = OpenAI(max_tokens=int(tokens), **SETTINGS)
    answer = "".join(llm.stream(prompt)) if way.endswith("stream") else llm.invoke(prompt)
else:
    chat = ChatOpenAI(max_tokens=int(tokens), **SETTINGS)
    if way.endswith("astream"):

        async def read() -> str:
            return "".join([chunk.content async for chunk in chat.astream(prompt)])

        answer = asyncio.run(read())
    else:
        found = chat.invoke(prompt)
        assert found.usage_metadata["output_tokens"] == int(tokens)
        answer = found.content
print("ANSWER", json.dumps(answer))
