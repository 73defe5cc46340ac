"""The OpenAI service's clients that `make clients` runs, and its exit code."""

from __future__ import annotations

from tests.clients.environments import ENVIRONMENTS
from tests.clients.judge import Expected, judge
from tests.clients.openai_programs import OPENAI_PROGRAMS
from tests.clients.program import Program
from tests.clients.run import unexpected
from tests.clients.table import Row


def test_every_client_is_pinned_and_uses_a_route() -> None:
    for program in OPENAI_PROGRAMS:
        assert program.route.startswith("/v1/"), program
        assert program.answers or program.shows, program
        requirements = ENVIRONMENTS[program.environment].requirements
        assert all("==" in one or "@" in one for one in requirements), requirements


def test_an_answer_to_a_chat_is_compared_with_that_to_the_chats_prompt() -> None:
    expected = Expected("The capital", " of France", chat="It is Paris.")
    chat = Program("a client", "chat", answers=True, route="/v1/chat/completions")
    text = Program("a client", "completion", answers=True, route="/v1/completions")
    assert judge(chat, 0, 'ANSWER "It is Paris."', expected).works
    assert not judge(text, 0, 'ANSWER "It is Paris."', expected).works
    assert judge(text, 0, 'ANSWER " of France"', expected).works


def test_a_failure_without_a_known_reason_fails_the_run() -> None:
    programs = [Program("a", "x"), Program("b", "y", why="known"), Program("c", "z")]
    rows = [Row(one.name, "", one.use, "", "does not: no") for one in programs[:2]]
    rows.append(Row("c", "", "z", "", "works with `--x`"))
    assert unexpected(programs, rows) == programs[:1]
