"""Chat templates: rendered as transformers renders them, and every way to fail is one clear error."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from vkdecode.errors import ChatTemplateError
from vkdecode.text import ChatTemplate

HELLO = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = HELLO, **variables: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}, "model").render(messages, **variables)


def refusal(source: str, messages: Any = HELLO, **variables: Any) -> str:
    with pytest.raises(ChatTemplateError) as caught:
        render(source, messages, **variables)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


def test_variables_and_whitespace_are_as_in_transformers() -> None:
    source = (
        "{{ bos_token }}{% for message in messages %}\n"
        "    {% if message.role == 'user' %}\n"
        "<{{ message['content'] | trim }}>\n"
        "    {% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}answer:{% endif %}"
    )
    assert render(source, [{"role": "user", "content": " a "}, {"role": "x", "content": "b"}]) == "<s><a>\nanswer:"
    assert render(source, add_generation_prompt=False) == "<s><hi>\n"


def test_own_variables_and_defaults() -> None:
    assert render("{{ thinking }}{{ tools is none }}{{ documents is none }}", thinking=True) == "TrueTrueTrue"
    assert render("{{ nothing }}|{{ nothing is defined }}") == "|False"


def test_json_has_no_html_escapes() -> None:
    assert render("{{ tools | tojson }}", tools=[{"a": "<é&'>"}]) == """[{"a": "<é&'>"}]"""
    assert render("{{ tools | tojson(indent=2) }}", tools=[1]) == "[\n  1\n]"


def test_loop_controls_generation_blocks_and_the_clock() -> None:
    source = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "01"
    assert render("{% generation %}a{{ 1 + 1 }}{% endgeneration %}b") == "a2b"
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.datetime.now().year + off) for off in (-1, 0)}


def test_namespace_macros_and_string_methods_work() -> None:
    source = (
        "{% set ns = namespace(text='') %}{% macro tag(x) %}[{{ x }}]{% endmacro %}"
        "{% for m in messages %}{% set ns.text = ns.text ~ tag(m.content) + '!' %}{% endfor %}"
        "{{ ns.text }}"
        "{{ '-' * 3 }}{{ 'a,b'.split(',') | join('+') }}{{ '%s!' % 'x' }}{{ 'hi'.upper().replace('H', 'J') }}"
    )
    assert render(source) == "[hi]!---a+bx!JI"


def test_tool_template_is_used_where_there_are_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {}, "model")
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[{"name": "f"}]) == "tools"
    assert ChatTemplate({"only": "x"}, {}, "model").render(HELLO) == "x"
    with pytest.raises(ChatTemplateError, match="none named default"):
        ChatTemplate({"a": "x", "b": "y"}, {}, "model").render(HELLO)
    with pytest.raises(ChatTemplateError, match="empty"):
        ChatTemplate({}, {}, "model")


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "hi"}]
    render("{% set m = messages[0] %}{{ m.content }}", messages)
    assert messages == [{"role": "user", "content": "hi"}]
    assert "SecurityError" in refusal("{{ messages.append(1) }}")
    assert "SecurityError" in refusal("{{ messages[0].update(role='x') }}")


def test_refusal_of_the_template_is_passed_on_in_one_line() -> None:
    text = refusal("{{ raise_exception('roles must\n alternate') }}")
    assert "refuses these messages: roles must alternate" in text


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{% for %}", "line 1"),
        ("\n\n{{ unclosed", "line 3"),
        ("{% endif %}", "endif"),
        ("{{ x | no_such_filter }}", "no_such_filter"),
        ("{{ missing.attribute.deeper }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{% include 'other' %}", "TypeError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ raise_exception.__globals__.items() }}", "SecurityError"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "SecurityError"),
        ("{{ ((" * 2000, "failed"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_broken_and_prying_templates(source: str, word: str) -> None:
    text = refusal(source)
    assert word in text or (word == "failed" and "not valid" in text)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% if false %}x{% endif %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ [0] * 10**10 }}",
        "{{ 10 ** (10 ** 8) }}",
        "{{ 'a' | center(10**9) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a' | indent(10**9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s | replace('a', ns.s) %}{% endfor %}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s.join(ns.s) %}{% endfor %}",
        "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ lipsum(100000) }}",
    ],
)
def test_endless_loops_and_absurd_sizes_are_stopped(source: str) -> None:
    assert "chat template of model" in refusal(source)


def test_a_long_conversation_is_no_endless_loop() -> None:
    messages = [{"role": ("user", "assistant")[index % 2], "content": "word " * 100} for index in range(300)]
    source = (
        "{% for m in messages %}{% for n in m.content.split() %}{{ n | trim }} {% endfor %}{{ loop.index }}{% endfor %}"
    )
    assert len(render(source, messages)) > 150_000


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], "no messages"),
        ("hi", "list"),
        ({"role": "user", "content": "x"}, "list"),
        (None, "list"),
        (["hi"], "message 0"),
        ([{"content": "x"}], "message 0 has no role"),
        ([{"role": "", "content": "x"}], "no role"),
        ([{"role": 3, "content": "x"}], "no role"),
        ([*HELLO, {"role": "user"}], "message 1 (role 'user') has no content"),
        ([{"role": "user", "content": None}], "no content"),
        ([{"role": "user", "content": 5}], "no content"),
        ([{"role": "user", "content": ["text"]}], "no content"),
    ],
)
def test_messages_of_the_wrong_form(messages: Any, word: str) -> None:
    assert word in refusal("x", messages)


def test_messages_that_some_templates_need() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert render("{{ messages[0].content[0].text }}", parts) == "hi"
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert render("{{ messages[0].tool_calls[0].name }}", calls) == "f"
