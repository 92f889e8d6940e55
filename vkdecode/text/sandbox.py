"""The jinja environment in which chat templates run: no access to Python, and an end to loops and sizes.

A template comes out of a downloaded file, so it must not be able to hang the process or take its memory. Jinja's
sandbox guards attributes; this one also counts loop rounds and calls, and checks the size of what operators, methods
and filters make.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TEXT = 4 << 20
"""Characters of any string, and of the rendered chat."""
MAX_STEPS = 1_000_000
"""Loop rounds of one rendering; a call counts as several, as do characters and items that operations make."""
_MAX_NUMBER = 1 << 20  # of an argument: a width, a count, a length
_MAX_BITS = 4096
_WIDE_FORMAT = re.compile(r"[0-9]{6,}")
_CALL_STEPS = 5
_SIZE_PER_STEP = 100

_steps: ContextVar[list[int]] = ContextVar("_steps")


class TemplateLimitError(Exception):
    """A template did too much work or made too large a value."""


class TemplateRefusal(Exception):
    """A template called `raise_exception`; the message is the template's own."""


def start_budget() -> None:
    """Give the current thread or task a fresh number of steps."""
    _steps.set([MAX_STEPS])


def _spend(steps: int) -> None:
    budget = _steps.get([MAX_STEPS])
    budget[0] -= steps
    if budget[0] < 0:
        raise TemplateLimitError(f"it takes more than {MAX_STEPS} steps; a loop in it does not end")


def _check_size(value: Any) -> Any:
    if isinstance(value, (str, bytes, list, tuple, dict)):
        if len(value) > MAX_TEXT:
            raise TemplateLimitError(f"it makes a value of {len(value)} characters or items; {MAX_TEXT} are allowed")
        _spend(len(value) // _SIZE_PER_STEP)
    elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise TemplateLimitError(f"it makes a number of more than {_MAX_BITS} bits")
    return value


def _check_arguments(name: str, subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call whose result would be too large before it is made."""
    _spend(_CALL_STEPS)
    given = (*args, *kwargs.values())
    if any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in given):
        raise TemplateLimitError(f"it calls {name} with a number above {_MAX_NUMBER}")
    texts = [value for value in (subject, *given) if isinstance(value, str)]
    if name == "replace" and len(texts) == 3 and len(texts[2]) * (texts[0].count(texts[1]) + 1) > MAX_TEXT:
        raise TemplateLimitError(f"its replace makes a text of more than {MAX_TEXT} characters")
    if name == "join" and sum(map(len, texts)) * sum(map(_length, (subject, *given))) > 16 * MAX_TEXT:
        raise TemplateLimitError("its join makes a text that is too long")
    if name in ("format", "format_map") and any(map(_WIDE_FORMAT.search, texts)):
        raise TemplateLimitError("it formats a value to an absurd width")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 0


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that its arguments and its result are checked; jinja's own marks on it are kept."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        values = tuple(
            value for value in args if not isinstance(value, (Context, nodes.EvalContext, TemplateEnvironment))
        )
        _check_arguments(name, values[0] if values else None, values[1:], kwargs)
        return _check_size(function(*args, **kwargs))

    return checked


class _CountSteps(NodeTransformer):
    """Makes each loop and macro body take a step, and sends `~` through a checked function."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._count(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._count(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._count(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        join = nodes.EnvironmentAttribute("join_texts", lineno=node.lineno)
        return nodes.Call(join, node.nodes, [], None, None, lineno=node.lineno)

    def _count(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("step", lineno=node.lineno), lineno=node.lineno))
        return node


class _Generation(Extension):
    """The `generation` block, with which training templates mark the assistant's text: rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012  # jinja declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face sets it up for chat templates, with limits."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters["tojson"] = _tojson
        self.filters = {name: _guarded(name, function) for name, function in self.filters.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _CountSteps().visit(tree)
        return tree

    @property
    def step(self) -> None:
        """Nothing, but reading it takes one step: much cheaper than the sandbox's way to call something."""
        _spend(1)

    def join_texts(self, *parts: Any) -> str:
        """Join the texts of the parts, as the `~` operator does."""
        texts = [str(part) for part in parts]
        if sum(map(len, texts)) > MAX_TEXT:
            raise TemplateLimitError(f"it makes a text of more than {MAX_TEXT} characters")
        return "".join(texts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something from a template, within the limits."""
        _check_arguments(getattr(__obj, "__name__", "a function"), getattr(__obj, "__self__", None), args, kwargs)
        return _check_size(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Sandbox `str.format` and refuse absurd widths in the format itself."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FORMAT.search(value.__self__):
            raise TemplateLimitError("it formats a value to an absurd width")
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operation unless its result would be too large."""
        if operator == "*":
            _check_product(left, right)
            _check_product(right, left)
        elif operator == "+":
            if _length(left) + _length(right) > MAX_TEXT:
                raise TemplateLimitError(f"it makes a value of more than {MAX_TEXT} characters or items")
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_BITS:
                raise TemplateLimitError(f"it makes a number of more than {_MAX_BITS} bits")
        elif isinstance(left, str) and (_WIDE_FORMAT.search(left) or "*" in left):
            raise TemplateLimitError("it formats a value to an absurd width")
        return _check_size(super().call_binop(context, operator, left, right))


def _check_product(repeated: Any, count: Any) -> None:
    if isinstance(count, int) and _length(repeated) * count > MAX_TEXT:
        raise TemplateLimitError(f"it makes a value of more than {MAX_TEXT} characters or items")


def _raise_exception(message: Any) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the HTML escapes of jinja's own filter, which models have not seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
