"""pydantic-ai's agents: URL MODEL PROMPT TOKENS WAY."""

import asyncio
import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, model, prompt, tokens, way = sys.argv[1:]


class Weather(BaseModel):
    """The place whose weather is wanted."""

    city: str


served = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))
settings = {"temperature": 0.0, "max_tokens": int(tokens)}


async def streamed() -> str:
    async with Agent(served, model_settings=settings).run_stream(prompt) as result:
        return await result.get_output()


if way in ("output_type", "NativeOutput"):
    wanted = NativeOutput(Weather) if way == "NativeOutput" else Weather
    agent = Agent(served, output_type=wanted, model_settings={**settings, "max_tokens": 64}, retries=2)
    answer = agent.run_sync("What is the weather in Paris?").output.city
elif way == "run_stream":
    answer = asyncio.run(streamed())
else:
    answer = Agent(served, model_settings=settings).run_sync(prompt).output
print("ANSWER", json.dumps(answer))
