"""`tridecode chat`: commands, an answer that is stopped, what is saved, and a real OpenAI service."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest

from tests.backend.front.fronts import Front, repository
from tests.fake_engine import FakeEngine, FakeSupervisor, scripted
from tests.waiting import wait_until
from tridecode.backend.base.errors import ConfigError, EngineDownError, TridecodeError
from tridecode.tools.chat.conversation import Conversation
from tridecode.tools.chat.sources import Question, Service
from tridecode.tools.chat.terminal import Chat

TEXT = " the ferry leaves at seven and returns at nine"


class Scripted:
    """Answers with pieces; a piece that is an exception is raised."""

    name = "scripted"

    def __init__(self, *answers: list, chats: bool = True):
        self.answers, self.chats = list(answers), chats
        self.asked: list[Question] = []
        self.closed = 0

    def answer(self, question: Question) -> Iterator[tuple[str, int]]:
        self.asked.append(question)
        try:
            for piece in self.answers.pop(0):
                if isinstance(piece, BaseException):
                    raise piece
                yield piece, 1
        finally:
            self.closed += 1

    def close(self) -> None: ...


def talk(source: Scripted, *lines: str | BaseException) -> Conversation:
    conversation, waiting = Conversation(source.chats), list(lines)

    def read(_: str) -> str:
        if not waiting:
            raise EOFError
        line = waiting.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    Chat(source, conversation, read).run()
    assert not waiting or "/exit" in lines
    return conversation


def test_turns_follow_each_other_with_the_system_message_first(capsys) -> None:
    source = Scripted(["Hello", " you"], ["Bye"])
    conversation = talk(source, "/system Be short.", "Hi", "", "Go")
    assert source.asked[0].messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
    ]
    assert [one["content"] for one in source.asked[1].messages] == ["Be short.", "Hi", "Hello you", "Go"]
    assert conversation.messages[-1] == {"role": "assistant", "content": "Bye"}
    printed = capsys.readouterr()
    assert printed.out == "Hello you\nBye\n" and "2 tokens, the first after" in printed.err


def test_a_model_without_a_template_continues_the_text(capsys) -> None:
    source = Scripted([" upon"], [" time"], chats=False)
    talk(source, "Once", " a")
    assert [one.text for one in source.asked] == ["Once", "Once upon a"]
    assert "no chat template" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_program(capsys) -> None:
    source = Scripted(["Hello", KeyboardInterrupt()], ["again"])
    conversation = talk(source, "Hi", KeyboardInterrupt(), "More")
    assert [one["content"] for one in conversation.messages] == ["Hi", "Hello", "More", "again"]
    assert source.closed == 2 and "stopped" in capsys.readouterr().err


def test_a_question_without_an_answer_is_taken_back(capsys) -> None:
    source = Scripted([EngineDownError("the engine is being rebuilt")], ["Hello"])
    conversation = talk(source, "Hi", "Hi again")
    assert [one["content"] for one in conversation.messages] == ["Hi again", "Hello"]
    assert "error: the engine is being rebuilt" in capsys.readouterr().err


def test_retry_asks_the_last_question_again(capsys) -> None:
    source = Scripted(["one"], ["two"])
    conversation = talk(source, "/retry", "Hi", "/retry")
    assert source.asked[0].messages == source.asked[1].messages
    assert [one["content"] for one in conversation.messages] == ["Hi", "two"]
    assert "error: there is no answer to repeat" in capsys.readouterr().err


WRONG = ("/params heat=1", "/params top_k=x")


def test_parameters_are_sent_and_reset(capsys) -> None:
    source = Scripted(["a"], ["b"])
    talk(
        source,
        "/params temperature=0.5 top_k=3",
        "Hi",
        "/params top_k=",
        "Hi",
        "/params heat=1",
        "/params top_k=x",
    )
    assert [one.values for one in source.asked] == [{"temperature": 0.5, "top_k": 3}, {"temperature": 0.5}]
    errors = capsys.readouterr().err
    assert "'heat=1': wanted NAME=VALUE with a NAME of temperature" in errors
    assert "top_k is 'x'; wanted a whole number" in errors


def test_a_conversation_is_saved_and_read_again(tmp_path, capsys) -> None:
    file = tmp_path / "a talk.json"
    talk(Scripted(["Hello"]), "/system Be short.", "/params seed=3", "Hi", f"/save '{file}'")
    assert json.loads(file.read_text())["messages"][1] == {"role": "assistant", "content": "Hello"}
    source = Scripted(["Bye"])
    conversation = talk(source, f"/load '{file}'", "Go")
    assert conversation.system == "Be short." and source.asked[0].values == {"seed": 3}
    assert [one["content"] for one in conversation.messages] == ["Hi", "Hello", "Go", "Bye"]


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"messages": 3}', '{"messages": [{"role": "user"}]}', '{"messages": [], "params": {"x": 1}}'],
)
def test_a_file_that_is_no_conversation_changes_nothing(tmp_path, content) -> None:
    file = tmp_path / "talk.json"
    file.write_text(content)
    conversation = Conversation(True, "system", [{"role": "user", "content": "Hi"}], {"seed": 3})
    with pytest.raises(ConfigError):
        conversation.load(file)
    assert (conversation.system, len(conversation.messages), conversation.values) == (
        "system",
        1,
        {"seed": 3},
    )


def test_an_unknown_command_and_missing_files_are_errors(capsys, tmp_path) -> None:
    talk(Scripted(), "/sing", f"/load {tmp_path}/absent", "/save", "/exit", "never read")
    errors = capsys.readouterr().err
    assert "/sing is not a command; /help lists them" in errors
    assert "absent cannot be read: No such file" in errors and "wanted the name of one file" in errors


# ---------------------------------------------------------------- a service


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("chat")
    repo = repository(folder / "repo")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(repo / "text" / "1" / "tokenizer" / "tokenizer.json"))
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    with (
        FakeEngine(next_token=scripted(ids), step_s=0.01) as engine,
        FakeSupervisor(engine) as supervisor,
        Front(repo, folder / "front.log", TRIDECODE_CONTROL_ENDPOINT=supervisor.endpoint) as front,
    ):
        front.engine = engine  # type: ignore[attr-defined]
        yield front


def test_a_real_service_answers_and_counts_tokens(service) -> None:
    source = Service(f"{service.url}/v1")
    pieces = list(source.answer(Question([{"role": "user", "content": "When?"}], "When?", {"max_tokens": 5})))
    assert sum(count for _, count in pieces) == 5 and TEXT.startswith("".join(text for text, _ in pieces))
    with pytest.raises(TridecodeError, match="max_tokens.*status 400"):
        list(source.answer(Question([{"role": "user", "content": "a"}], "a", {"max_tokens": -1})))
    source.close()


def test_an_address_where_nothing_answers_is_named() -> None:
    with pytest.raises(EngineDownError, match="http://127.0.0.1:9 does not answer"):
        Service("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="wanted http://host:port"):
        Service("ftp://127.0.0.1")


def test_a_signal_stops_the_answer_of_the_command(service) -> None:
    service.engine.step_s = 0.2  # the answer takes longer than a slow machine needs for a signal
    command = [sys.executable, "-m", "tridecode.tools.cli", "chat", service.url, "--set", "max_tokens=400"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # a shell's background job ignores SIGINT, and so would all of its children
    preexec = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, **pipes, text=True, bufsize=0, preexec_fn=preexec) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("Hi\n")
            process.stdin.flush()
            assert process.stdout.read(4)
            process.send_signal(signal.SIGINT)
            wait_until(lambda: service.engine.running == 0, 30, "the engine to have no request")
            service.engine.step_s = 0.01
            process.stdin.write("/params max_tokens=3\nHi\n/exit\n")
            _, errors = process.communicate(timeout=30)
        finally:
            service.engine.step_s = 0.01
            process.kill()
    assert process.returncode == 0, errors
    assert "stopped" in errors and "3 tokens" in errors
