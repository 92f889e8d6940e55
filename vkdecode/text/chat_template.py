"""Chat templates: from messages to the text that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from vkdecode.errors import ChatTemplateError
from vkdecode.text.sandbox import MAX_TEXT, TemplateEnvironment, TemplateLimitError, TemplateRefusal, start_budget

Message = Mapping[str, Any]


class ChatTemplate:
    """One or more named jinja templates of a model; compiled when first used.

    `templates` maps names to sources: "default" is used for plain chats, "tool_use", where there is one, when `tools`
    are given. `special_tokens` are variables such as `bos_token` that templates may use.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], where: str) -> None:
        if not templates:
            raise ChatTemplateError(f"{where} has an empty list of chat templates")
        self.templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._where = where
        self._compiled: dict[str, jinja2.Template] = {}

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Return the text of a chat; `ChatTemplateError` for bad messages or a template that fails or refuses them."""
        checked = check_messages(messages)
        name = self._choose(variables.get("tools"))
        start_budget()
        try:
            return self._render(name, checked, add_generation_prompt, variables)
        except ChatTemplateError:
            raise
        except TemplateRefusal as error:
            raise ChatTemplateError(
                f"the chat template of {self._where} refuses these messages: {_one_line(error)}"
            ) from error
        except TemplateLimitError as error:
            raise ChatTemplateError(f"the chat template of {self._where} was stopped: {_one_line(error)}") from error
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template of {self._where} is not valid jinja, line {error.lineno}: {_one_line(error)}"
            ) from error
        except Exception as error:  # whatever a template manages to raise is the template's failure
            reason = f"{type(error).__name__}: {_one_line(error)}"
            raise ChatTemplateError(f"the chat template of {self._where} failed: {reason}") from error

    def _render(
        self, name: str, messages: list[Message], add_generation_prompt: bool, variables: dict[str, Any]
    ) -> str:
        template = self._compiled.get(name)
        if template is None:
            template = self._compiled[name] = TemplateEnvironment().from_string(self.templates[name])
        values = {"tools": None, "documents": None, **self._special_tokens, **variables}
        pieces: list[str] = []
        size = 0
        for piece in template.generate(messages=messages, add_generation_prompt=add_generation_prompt, **values):
            size += len(piece)
            if size > MAX_TEXT:
                raise TemplateLimitError(f"it writes more than {MAX_TEXT} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _choose(self, tools: object) -> str:
        if tools and "tool_use" in self.templates:
            return "tool_use"
        if "default" in self.templates:
            return "default"
        if len(self.templates) == 1:
            return next(iter(self.templates))
        raise ChatTemplateError(f"{self._where} has chat templates {', '.join(self.templates)}, but none named default")


def check_messages(messages: Sequence[Message]) -> list[Message]:
    """Check that messages are objects with a role and a content, and return them as a list.

    Content is a string, or a list of parts as some templates want; it may be missing where there are `tool_calls`.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ChatTemplateError(
            f"messages must be a list of objects with role and content, not {type(messages).__name__}"
        )
    if not messages:
        raise ChatTemplateError("there are no messages; a chat needs at least one")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ChatTemplateError(
                f"message {index} is {type(message).__name__}; an object with role and content is needed"
            )
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ChatTemplateError(f"message {index} has no role; it needs one such as 'user'")
        if content is None and message.get("tool_calls"):
            continue
        is_parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
        if not isinstance(content, str) and not is_parts:
            raise ChatTemplateError(f"message {index} (role {role!r}) has no content; a string is needed")
    return [dict(message) for message in messages]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or "no reason given"
