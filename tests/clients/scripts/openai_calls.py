"""openai's Python client: URL MODEL PROMPT TOKENS WAY. It checks what the answer has besides its text."""

import asyncio
import json
import sys

import openai
from pydantic import BaseModel

url, model, prompt, tokens, way = sys.argv[1:]
WANTED = {"model": model, "max_tokens": int(tokens), "temperature": 0}
MESSAGES = [{"role": "user", "content": prompt}]


class Weather(BaseModel):
    """The place whose weather is wanted."""

    city: str


client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


def completion() -> str:
    found = client.completions.create(prompt=prompt, logprobs=2, **WANTED)
    (choice,) = found.choices
    assert "".join(choice.logprobs.tokens) == choice.text
    assert len(choice.logprobs.top_logprobs[0]) in (2, 3) and choice.logprobs.text_offset[0] == 0
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    return choice.text


def completion_stream() -> str:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.completions.create(prompt=prompt, **options, **WANTED)
    assert not last.choices and last.usage.completion_tokens == int(tokens)
    assert chunks[-1].choices[0].finish_reason == "length" and len(chunks) > 2
    return "".join(chunk.choices[0].text for chunk in chunks)


def chat() -> str:
    found = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **WANTED)
    (choice,) = found.choices
    steps = choice.logprobs.content
    assert b"".join(bytes(step.bytes) for step in steps).decode() == choice.message.content
    assert all(len(step.top_logprobs) == 3 for step in steps) and found.system_fingerprint
    return choice.message.content


def chat_stream() -> str:
    """The client's own accumulation of a stream."""
    with client.chat.completions.stream(messages=MESSAGES, **WANTED) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        try:
            final = stream.get_final_completion().choices[0]
        except openai.LengthFinishReasonError as error:  # the client's word for an answer of max_tokens
            final = error.completion.choices[0]
    assert final.finish_reason == "length" and "".join(deltas) == final.message.content
    return final.message.content


def asynchronous() -> str:
    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as several:
            asked = [several.chat.completions.create(messages=MESSAGES, **WANTED) for _ in range(4)]
            return [found.choices[0].message.content for found in await asyncio.gather(*asked)]

    answers = asyncio.run(many())
    assert len(set(answers)) == 1, answers
    return answers[0]


def errors_models_and_embeddings() -> str:
    assert [card.id for card in client.models.list()] == [model] and client.models.retrieve(model).id == model
    try:
        client.chat.completions.create(messages=MESSAGES, **{**WANTED, "model": "absent"})
    except openai.NotFoundError as error:
        assert (error.code, error.param) == ("model_not_found", "model")
    try:
        client.completions.create(prompt=prompt, **{**WANTED, "temperature": -1})
    except openai.BadRequestError as error:
        assert error.param == "temperature"
    coded, plain = (
        client.embeddings.create(model=model, input=[prompt, "x"], **options)
        for options in ({}, {"encoding_format": "float"})  # the client requests base64 by default
    )
    assert [len(one.embedding) for one in coded.data] == [len(one.embedding) for one in plain.data]
    for one, other in zip(coded.data, plain.data):
        assert max(abs(x - y) for x, y in zip(one.embedding, other.embedding)) < 1e-4
        assert abs(sum(x * x for x in one.embedding) - 1) < 1e-4
    raw = client.completions.with_raw_response.create(prompt=prompt, user="me", **WANTED)
    assert raw.headers["x-tridecode-no-effect"] == "user" and raw.request_id
    return raw.parse().choices[0].text


def parse() -> str:
    """An answer of a form, whole and streamed."""
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    settings = {"model": model, "messages": question, "temperature": 0, "max_tokens": 64}
    found = client.chat.completions.parse(response_format=Weather, **settings).choices[0].message.parsed
    with client.chat.completions.stream(response_format=Weather, **settings) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert streamed == found
    return found.city


WAYS = {
    "completions": completion,
    "completions, stream": completion_stream,
    "chat": chat,
    "chat, stream": chat_stream,
    "AsyncOpenAI": asynchronous,
    "parse": parse,
    "models, errors, raw response": errors_models_and_embeddings,
}
print("ANSWER", json.dumps(WAYS[way]()))
