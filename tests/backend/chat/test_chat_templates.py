"""Chat templates in their child process: transformers' result, and hard limits of time and memory."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.waiting import wait_until
from tridecode.backend.chat.templates import RenderLimits, TemplateFault, TemplateRenderer, render_template

MESSAGES = [
    {"role": "system", "content": "Be <brief> & “kind”."},
    {"role": "user", "content": "How deep is the 港?"},
    {"role": "assistant", "content": "Twelve metres.", "reasoning_content": "Charts say so."},
]
TOOL = {"type": "function", "function": {"name": "depth", "parameters": {"x": {"type": "number"}}}}
#: features of published templates: loops and their controls, tojson, macros, namespaces, dates, generation
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '\\n' }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if m.role == 'assistant' %}{% break %}{% endif %}"
    "{% if loop.first %}{% continue %}{% endif %}{{ m.content | trim }}{% endfor %}",
    "tools": "{% for t in tools %}{{ t | tojson }}{{ t | tojson(indent=2) }}{% endfor %}",
    "namespace": "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ ns.last }}",
    "macro": "{% macro show(m) %}[{{ m.role }}: {{ m.content }}]{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "strings": "{% for m in messages %}{{ m.content.split(' ')[0].upper() }}{{ m.content[:3] }}"
    "{{ m.content.replace('e', '3') }}{% endfor %}{{ dict(a=1)['a'] }}",
    "date": "{{ strftime_now('%Y') }}",
    "blank control": "\n    {%- if messages %}\n  yes\n    {% endif %}\n",
}


@pytest.fixture(scope="module")
def renderer():
    made = TemplateRenderer(RenderLimits(seconds=1.0, memory_bytes=256 << 20))
    yield made
    made.close()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_transformers_renders_it(renderer, name) -> None:
    source = TEMPLATES[name]
    [wanted], _ = render_jinja_template(conversations=[MESSAGES], tools=[TOOL], chat_template=source)
    found = renderer.render(source, {"messages": MESSAGES, "tools": [TOOL], "add_generation_prompt": False})
    assert found == wanted


REFUSED = {
    "{{ raise_exception('no user may speak') }}": "no user may speak",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe",
    "{{ cycler.__init__.__globals__.os.system('true') }}": "unsafe|undefined",
    "{% set n = namespace(__init__=1) %}": "begins with _",
    "{{ messages.append(1) }}": "unsafe",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{% include '/etc/passwd' %}": "no loader",
    "{{": "end of template",
    "{{ '\\ud800' }}": "UnicodeEncodeError",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "RecursionError|ends the process",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}": "RecursionError|ends the process|does not answer|nested|parse",
}
LONG = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "more than 1 s",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}": "more than 1 s",
    "{% set a = range(99999) | list %}{% for i in a %}{% set b = a | sort %}{% endfor %}": "more than 1 s",
    "{% for i in range(9999) %}{% set b = 'x'.ljust(9999999).upper() %}{% endfor %}": "more than 1 s",
    "{% for i in range(10 ** 9) %}{% endfor %}": "not allowed",
}
LARGE = {
    "{{ 'x' * 10000000000 }}": "a product is larger than",
    "{{ [0] * 10000000000 }}": "a product is larger than",
    "{{ 'a'.ljust(3000000000) }}": "memory",
    "{{ 'a'.center(3000000000) }}": "memory",
    "{{ '1'.zfill(3000000000) }}": "memory",
    "{{ 'a\\tb'.expandtabs(2000000000) }}": "memory",
    "{{ '%2000000000d' % 1 }}": "memory",
    "{{ '%2000000000d' | format(1) }}": "memory",
    "{{ '{:2000000000}'.format(1) }}": "memory",
    "{{ 'a' | center(2000000000) }}": "memory",
    "{{ 'a\nb' | indent(2000000000) }}": "memory",
    "{{ [[1]] | tojson(indent=2000000000) }}": "memory",
    "{% set ns = namespace(s='ab') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"
    "{{ ns.s }}": "memory",
    "{% set ns = namespace(s='ab') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
    "{{ ns.s | length }}": "memory",
    "{% set ns = namespace(s=['a']) %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"
    "{{ ns.s | length }}": "memory",
    "{{ range(90000) | map('string') | map('center', 90000) | list | length }}": "memory",
    "{{ lipsum(n=100000) | length }}": "more than 1 s|memory",
    "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}": "more than 8,388,608 characters",
}
ENDLESS = next(iter(LONG))
#: on a busy machine the clock may come before the memory
HOSTILE = {**REFUSED, **LONG, **{key: f"{found}|more than 1 s" for key, found in LARGE.items()}}


@pytest.mark.parametrize("template", HOSTILE)
def test_a_template_that_does_harm_is_refused_within_its_limits(renderer, template) -> None:
    started = time.monotonic()
    with pytest.raises(TemplateFault, match=HOSTILE[template]):
        renderer.render(template, {"messages": MESSAGES})
    assert time.monotonic() - started < 1.0 + 5.0  # of one render, and of a start on a busy machine
    assert renderer.render("{{ messages[0].role }}", {"messages": MESSAGES}) == "system"


def test_a_child_never_holds_more_than_its_memory() -> None:
    """The test runs in a process of its own, so that it has no other children."""
    program = f"""
import json, resource
from tridecode.backend.chat.templates import RenderLimits, TemplateFault, TemplateRenderer
renderer = TemplateRenderer(RenderLimits(seconds=1.0, memory_bytes=256 << 20))
for template in json.loads({json.dumps(json.dumps(list(LARGE)))}):
    try:
        renderer.render(template, {{}})
    except TemplateFault:
        pass
renderer.close()
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < (256 << 20) + (64 << 20)  # the interpreter and jinja2 have 30 MB


def test_one_child_renders_many_templates_and_its_kill_is_not_noticed(renderer) -> None:
    renderer.render("a", {})
    first = renderer.pid
    started = time.monotonic()
    for number in range(500):
        assert renderer.render("{{ n }}", {"n": number}) == str(number)
    assert renderer.pid == first and time.monotonic() - started < 5.0
    os.kill(first, signal.SIGKILL)
    assert renderer.render("{{ 'next' }}", {}) == "next" and renderer.pid != first


def test_a_render_that_its_child_is_killed_under_is_given_to_one_more_child() -> None:
    """Kills from outside, while the template runs: the second one ends the render."""
    renderer = TemplateRenderer(RenderLimits(seconds=30.0))
    renderer.render("a", {})
    faults = []

    def work() -> None:
        try:
            renderer.render(ENDLESS, {})
        except TemplateFault as fault:
            faults.append(str(fault))

    thread = threading.Thread(daemon=True, target=work)
    thread.start()
    first = renderer.pid
    time.sleep(0.3)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: renderer.pid not in (None, first), 20)
    time.sleep(0.3)
    os.kill(renderer.pid, signal.SIGKILL)
    thread.join(20)
    assert faults == ["the process that renders it was killed twice (signal 9)"]
    assert renderer.render("{{ 'third' }}", {}) == "third"
    renderer.close()


def test_threads_get_their_own_answers(renderer) -> None:
    found: dict[int, str] = {}

    def work(number: int) -> None:
        for _ in range(20):
            found[number] = renderer.render("{{ n }}" * number, {"n": number})

    threads = [threading.Thread(daemon=True, target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: str(number) * number for number in range(1, 9)}


def test_a_child_that_still_renders_ends_by_itself_when_its_parent_has_gone() -> None:
    """The kernel ends it by its processor time: nobody is there to kill it."""
    program = """
import os, threading, time
from tridecode.backend.chat.templates import RenderLimits, TemplateRenderer
renderer = TemplateRenderer(RenderLimits(seconds=1.0))
renderer.render("a", {})
endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
threading.Thread(target=renderer.render, args=(endless, {}), daemon=True).start()
time.sleep(0.2)
print(renderer.pid, flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    pid = int(done.stdout)
    wait_until(lambda: not _lives(pid), 60)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_values_that_are_not_json_are_refused() -> None:
    with pytest.raises(TemplateFault, match="its variables are not JSON"):
        render_template("a", {"x": object()})


def test_the_parent_is_not_limited() -> None:
    render_template("a", {})
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
