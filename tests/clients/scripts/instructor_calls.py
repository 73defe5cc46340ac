"""instructor's typed answers: URL MODEL PROMPT TOKENS WAY."""

import json
import sys

import instructor
import openai
from pydantic import BaseModel

url, model, prompt, tokens, way = sys.argv[1:]


class Weather(BaseModel, extra="forbid"):  # else a small model adds fields without end
    """The place whose weather is wanted."""

    city: str


client = instructor.from_openai(
    openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=getattr(instructor.Mode, way)
)
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
found = client.chat.completions.create(
    model=model, messages=messages, response_model=Weather, max_tokens=64, temperature=0, max_retries=2
)
print("ANSWER", json.dumps(found.city))
