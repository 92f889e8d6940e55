from __future__ import annotations

import io
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes import END, START, FakeContext, FakeModel
from rich.console import Console

from vkdecode.chat import Terminal, one_line, printable
from vkdecode.conversation import Conversation
from vkdecode.errors import ContextLengthError, VkDecodeError

SPEED = re.compile(r"prompt \d+ tokens( \(\d+ cached\))?, \d+\.\d tok/s \| generated \d+ tokens, \d+\.\d tok/s")


class Chat:
    """A terminal with a fake model behind it; `run` types the given lines, an exception is raised where it stands."""

    def __init__(self, model: FakeModel, *, interactive: bool = True, color: bool = False, **options: Any) -> None:
        self.out = io.StringIO()
        self.conversation = Conversation(model, context=FakeContext(), **options)
        console = Console(file=self.out, highlight=False, force_terminal=color, width=40)
        self.terminal = Terminal(self.conversation, console, interactive=interactive)

    def run(self, *lines: str | BaseException | Callable[[], str]) -> str:
        left: Iterator[str | BaseException | Callable[[], str]] = iter(lines)

        def read_line() -> str:
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line if isinstance(line, str) else line()

        self.terminal.run(read_line)
        self.unread = list(left)
        return self.out.getvalue()


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_answer_ends_with_one_speed_line() -> None:
    chat = Chat(FakeModel("Paris."), interactive=False)
    answer, speed = chat.run("Capital?").splitlines()
    assert answer == "Paris."
    assert SPEED.fullmatch(speed)
    assert "generated 6 tokens" in speed


def test_the_speed_line_counts_computed_and_cached_tokens_apart() -> None:
    model = FakeModel("Yes")
    chat = Chat(model)
    chat.terminal.answer("a")
    model.say("No")
    chat.terminal.answer("b")
    speed = chat.out.getvalue().splitlines()[-1]
    assert f"prompt {len(model.fed[4])} tokens ({len(model.fed[0]) + 3} cached)," in speed
    assert len(speed) > 40  # longer than the console is wide, and still one line


def test_the_end_of_input_and_exit_leave() -> None:
    for last in (EOFError(), "/exit", "/quit", "  /exit  "):
        model = FakeModel("a")
        chat = Chat(model)
        chat.run("", "   ", last, "not read")
        assert chat.unread == ["not read"]
        assert model.fed == []


def test_help_lists_the_commands_and_an_unknown_one_gives_a_hint() -> None:
    model = FakeModel()
    out = Chat(model).run("/help", "/rest now", "/")
    for command in ("/reset", "/exit", "/help", "Ctrl-C", "Ctrl-D"):
        assert command in out
    assert "unknown command /rest; /help lists the commands" in out
    assert "unknown command /;" in out
    assert model.fed == []


def test_reset_starts_over() -> None:
    model = FakeModel("one")
    chat = Chat(model)
    assert "starts over" in chat.run("first", "/reset", "second")
    assert [message["content"] for message in chat.conversation.messages] == ["second", ""]
    assert model.fed[-1] == [START, *b"user:second", END, START, *b"assistant:"]


@pytest.mark.parametrize(("line", "sent"), [("//help", "/help"), ("/etc/passwd?", "/etc/passwd?"), (" a /b ", "a /b")])
def test_lines_that_look_like_commands_can_be_sent(line: str, sent: str) -> None:
    chat = Chat(FakeModel("ok"))
    chat.run(line)
    assert chat.conversation.messages[0]["content"] == sent


@pytest.mark.parametrize("color", [False, True])
def test_model_output_is_printed_literally(color: bool) -> None:
    text = "[bold]x[/bold] :smile: [/] \\[a] http://x.y 'q' 12\n\tend"
    out = Chat(FakeModel(text), color=color).run("Hi")
    assert out.startswith(text + "\n")


def test_control_characters_of_the_model_are_made_harmless() -> None:
    evil = "a\x1b[31mb\x07\x00\x7f\x9b2Jc\rd\x85"
    out = Chat(FakeModel(evil)).run("Hi")
    assert out.startswith("a␛[31mb␇␀␡\ufffd2Jcd\ufffd\n")


def test_a_message_of_this_program_is_one_printable_line() -> None:
    assert one_line("bad\nfile \x1b]0;x\x07") == "bad file ␛]0;x␇"
    assert printable("tab\tand\nline é 🙂") == "tab\tand\nline é 🙂"


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said() -> None:
    model = FakeModel("Hello", failures={2: interrupt})
    handler = signal.getsignal(signal.SIGINT)
    chat = Chat(model)
    out = chat.run("Hi", lambda: model.say("ok") or "More")  # type: ignore[func-returns-value]  # say, then type
    # The token of the pass in which Ctrl-C came is still shown: nothing is torn.
    assert out.splitlines()[:2] == ["Hel", "(stopped)"]
    assert SPEED.fullmatch(out.splitlines()[2])
    assert [message["content"] for message in chat.conversation.messages] == ["Hi", "Hel", "More", "ok"]
    assert model.fed[3] == [*b"l", END, START, *b"user:More", END, START, *b"assistant:"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_ends_the_answer_at_once() -> None:
    def twice() -> None:
        interrupt()
        interrupt()

    chat = Chat(FakeModel("Hello", failures={2: twice}))
    assert chat.run("Hi").splitlines()[:2] == ["He", "(stopped)"]
    assert chat.conversation.messages[-1]["content"] == "He"


def test_ctrl_c_before_the_first_word_takes_the_message_back() -> None:
    chat = Chat(FakeModel("Hello", failures={0: KeyboardInterrupt()}))
    assert "taken back" in chat.run("Hi")
    assert chat.conversation.messages == []


def test_a_keyboard_interrupt_inside_a_pass_ends_the_answer_only() -> None:
    chat = Chat(FakeModel("Hello", failures={3: KeyboardInterrupt()}))
    out = chat.run("Hi", "More")
    assert out.startswith("Hel\n(stopped)\nprompt ")
    assert [message["content"] for message in chat.conversation.messages] == ["Hi", "Hel", "More", "lo"]


def test_ctrl_c_at_the_prompt_leaves_the_second_time_in_a_row() -> None:
    chat = Chat(FakeModel("a"))
    out = chat.run(KeyboardInterrupt(), "Hi", KeyboardInterrupt(), KeyboardInterrupt(), "not read")
    assert out.count("Ctrl-C again") == 2
    assert len(chat.conversation.messages) == 2
    assert chat.unread == ["not read"]


def test_ctrl_c_without_a_person_ends_everything_after_the_speed_line() -> None:
    chat = Chat(FakeModel("Hello", failures={2: interrupt}), interactive=False)
    with pytest.raises(KeyboardInterrupt):
        chat.run("Hi", "not read")
    assert SPEED.fullmatch(chat.out.getvalue().splitlines()[-1])
    with pytest.raises(KeyboardInterrupt):
        chat.run(KeyboardInterrupt())


def test_an_error_is_shown_to_a_person_and_the_conversation_goes_on() -> None:
    model = FakeModel("Hello", failures={1: VkDecodeError("device\nlost")})
    chat = Chat(model)
    out = chat.run("Hi", "More", "\udcff")
    assert out.startswith("H\nerror: device lost\nello\n")
    assert out.splitlines()[-2].startswith("error: the user message is not valid Unicode")
    assert [message["content"] for message in chat.conversation.messages] == ["Hi", "H", "More", "ello"]


def test_an_error_without_a_person_is_raised() -> None:
    chat = Chat(FakeModel("Hello", failures={1: VkDecodeError("device lost")}), interactive=False)
    with pytest.raises(VkDecodeError, match="device lost"):
        chat.run("Hi", "not read")
    assert chat.out.getvalue() == "H\n"


def test_a_full_context_says_what_to_do() -> None:
    chat = Chat(FakeModel("z" * 100), max_seq_len=30)
    out = chat.run("Hi", "More")
    assert "(the context of 30 tokens is full; /reset starts over)" in out
    assert re.search(r"^error: the conversation would have \d+ tokens .*/reset", out, re.MULTILINE)
    with pytest.raises(ContextLengthError):
        Chat(FakeModel(), max_seq_len=10, interactive=False).run("Hi")


def test_an_answer_that_is_cut_off_says_so() -> None:
    assert "abc\n(cut off by --max-tokens)\n" in Chat(FakeModel("abcdef"), max_tokens=3).run("Hi")


def test_an_answer_that_ends_its_own_line_gets_no_second_one() -> None:
    assert Chat(FakeModel("a\n")).run("Hi").startswith("a\nprompt ")
    assert Chat(FakeModel("")).run("Hi").startswith("prompt ")
