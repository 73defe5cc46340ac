"""Measures lookup drafts on answers that copy from their prompts: a real model edits and summarises texts.

    python -m tridecode.tools.bench.studies.copied_texts REPOSITORY --texts FILE [--prompts 16]
        [--batches 1,8] [--repeats 2] [--output FILE]

REPOSITORY: a chat model, converted by build-repo. FILE: JSON lines with "text". Every text is a task of each
kind, in the chat template of the model; the texts to be edited are misspelled first. Answers are greedy and
end where the model ends them. Runs with and without drafts alternate on one engine; each has a scheduler of
its own, so that no run copies from the answers of another one. Tokens per second count from the first token
of an answer to its last.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tridecode.backend.wire.messages import SamplingParams
from tridecode.model_repo_templates.repository import TOKENIZER_DIR
from tridecode.tools.bench.engines.ours import open_engine
from tridecode.tools.bench.jobs import make_job
from tridecode.tools.bench.load.prompts import find_tokenizer, read_prompts
from tridecode.tools.bench.speculate.run import batches_of
from tridecode.tools.bench.speculate.runner import Ran, SpeculationRunner
from tridecode.tools.client.chat import chat_prompt
from tridecode.tools.evaluate.in_process import repository_engine

TASKS = {
    "editing": "Correct the spelling and the punctuation of this text. Answer with the whole text:\n\n{text}",
    "summarising": "Summarize this text with its most important sentences:\n\n{text}",
}
_MOST_TOKENS = 192  # of an answer
_MISSPELLED = 8  # of this many words one is


@dataclass(frozen=True)
class Copied:
    """A comparison. tokens: of all answers. tokens_per_step: with drafts, of one sequence. same: answers that
    are equal with and without drafts; in 16 bit, texts may part where two logits are within rounding."""

    task: str
    batch: int
    answers: int
    tokens: int
    tokens_per_step: float
    plain_tokens_per_s: float
    tokens_per_s: float
    ratio: float
    same: int


def misspelled(text: str) -> str:
    """Return a text in which every eighth word of four letters or more has two letters exchanged."""
    words, place = text.split(" "), 0
    for number, word in enumerate(words):
        if word.isalpha() and len(word) > 3:
            place += 1
            if place % _MISSPELLED == 0:
                words[number] = word[0] + word[2] + word[1] + word[3:]
    return " ".join(words)


def prompts_of(repository: Path, task: str, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text's task."""
    tokenizer = find_tokenizer(repository)
    texts = [misspelled(text) for text in texts] if task == "editing" else texts
    asked = [chat_prompt(repository / TOKENIZER_DIR, TASKS[task].format(text=text)) for text in texts]
    return [tokenizer.encode(prompt.text, add_special_tokens=False).ids for prompt in asked]


def compare(
    runner: SpeculationRunner,
    task: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    batch: int,
    repeats: int,
) -> Copied:
    """Answer the prompts, `batch` at a time, with and without drafts in turns."""
    groups = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]

    def run(speculate: bool) -> list[Ran]:
        return [runner.run(group, params, speculate) for group in groups]

    run(True)  # warms up
    pairs = [(run(False), run(True)) for _ in range(repeats)]
    speeds = [[_speed(side) for side in pair] for pair in pairs]
    plain, drafted = pairs[-1]
    answers = [[one for ran in side for one in ran.tokens] for side in (plain, drafted)]
    decoded = sum(max(map(len, ran.tokens)) - 1 for ran in drafted)
    return Copied(
        task,
        batch,
        len(prompts),
        sum(map(len, answers[1])),
        round(decoded / max(sum(ran.steps for ran in drafted), 1), 3),
        round(statistics.median(usual for usual, _ in speeds), 1),
        round(statistics.median(fast for _, fast in speeds), 1),
        round(statistics.median(fast / usual for usual, fast in speeds), 3),
        sum(one == other for one, other in zip(*answers)),
    )


def _speed(side: Sequence[Ran]) -> float:
    """Return the tokens per second of a run of all prompts, without the first token of each."""
    tokens = sum(len(one) - 1 for ran in side for one in ran.tokens)
    return tokens / sum(ran.decode_s for ran in side)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repository", type=Path)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    weights, _ = repository_engine(arguments.repository)
    texts, batches = read_prompts(arguments.texts, arguments.prompts), batches_of(arguments.batches)
    tasks = {task: prompts_of(arguments.repository, task, texts) for task in TASKS}
    longest = max(len(prompt) for prompts in tasks.values() for prompt in prompts)
    job = make_job(
        "", weights, None,
        device=arguments.device, batches=(max(batches),), prompt_tokens=longest, output_tokens=_MOST_TOKENS,
        speculation="lookup",
    )  # fmt: skip
    found = []
    with open_engine(job) as engine:
        config, runner = engine.model_config, SpeculationRunner(engine)
        params = SamplingParams(
            max_tokens=_MOST_TOKENS, end_id=config.end_id, more_end_ids=[*config.more_end_ids]
        )
        for task, prompts in tasks.items():
            for batch in batches:
                one = compare(runner, task, prompts, params, batch, arguments.repeats)
                found.append(asdict(one))
                print(json.dumps(found[-1]), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
