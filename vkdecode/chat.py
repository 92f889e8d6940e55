"""The terminal side of a conversation: reads lines, streams answers, and lets Ctrl-C end no more than an answer."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from rich.console import Console
from rich.text import Text

from vkdecode.conversation import Conversation
from vkdecode.errors import VkDecodeError
from vkdecode.token_loop import Generation, TextStream

PROMPT = ">>> "

HELP = """\
/reset   forget the conversation and start over
/exit    leave (also Ctrl-D)
/help    show this list
Ctrl-C   stop the answer; at the prompt, twice, leave
A line that must start with a slash: write two."""

# A model may write any character. These would move the cursor, change colours or worse, so they show as symbols.
_CONTROL = {
    **{code: 0x2400 + code for code in range(0x20)},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    ord("\n"): ord("\n"),
    ord("\t"): ord("\t"),
    ord("\r"): None,
}


def printable(text: str) -> str:
    """Return `text` with control characters made visible, except newline and tab, and without carriage returns."""
    return text.translate(_CONTROL)


def one_line(text: str) -> str:
    """Return `text` as one printable line."""
    return printable(" ".join(text.split()))


class Terminal:
    """A conversation at a terminal or over pipes.

    `interactive` is whether a person is there to go on: then errors are shown, Ctrl-C ends only the answer, and the
    conversation continues. Otherwise both are raised.
    """

    def __init__(self, conversation: Conversation, console: Console, *, interactive: bool) -> None:
        self._conversation = conversation
        self._console = console
        self._interactive = interactive

    def note(self, text: str, style: str = "dim") -> None:
        """Print a line of this program, as opposed to the model's."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def answer(self, text: str) -> Generation:
        """Print the model's answer as it comes, then its speed line.

        Ctrl-C ends the answer before the next token, and a second one at once.
        """
        pieces = self._conversation.send(text)
        out = self._console.file
        last = "\n"
        try:
            with _ctrl_c_stops(pieces):
                for piece in pieces:
                    last = printable(piece) or last
                    out.write(printable(piece))
                    out.flush()
        except KeyboardInterrupt:
            pieces.close()
        finally:
            if not last.endswith("\n"):
                out.write("\n")
        result = pieces.result
        if result.finish_reason == "interrupted":
            self.note("(stopped)" if result.text else "(stopped before the first word; the message is taken back)")
        elif result.finish_reason == "context":
            self.note(f"(the context of {self._conversation.max_seq_len} tokens is full; /reset starts over)")
        elif result.finish_reason == "length":
            self.note("(cut off by --max-tokens)")
        self.note(str(result.usage))
        if result.finish_reason == "interrupted" and not self._interactive:
            raise KeyboardInterrupt
        return result

    def run(self, read_line: Callable[[], str]) -> None:
        """Answer line after line until `/exit` or the end of input, where `read_line` raises `EOFError`."""
        warned = False
        while True:
            try:
                line = read_line()
                warned = False
                if not self._handle(line.strip()):
                    return
            except EOFError:
                if self._interactive:
                    self.note("")
                return
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                if warned:
                    self.note("")
                    return
                warned = True
                self.note("\n(Ctrl-C again, Ctrl-D or /exit leaves)")
            except VkDecodeError as error:
                if not self._interactive:
                    raise
                self.note(one_line(f"error: {error}"), style="red")

    def _handle(self, line: str) -> bool:
        """Do what a line asks; return False when it asks to leave."""
        command = re.match(r"/(?!/)[^\s/]*(?=\s|$)", line)
        if command is None:
            text = line[1:] if line.startswith("//") else line
            if text:
                self.answer(text)
        elif command[0] in ("/exit", "/quit"):
            return False
        elif command[0] == "/reset":
            self._conversation.reset()
            self.note("(the conversation starts over)")
        elif command[0] == "/help":
            self.note(HELP)
        else:
            self.note(f"unknown command {printable(command[0])}; /help lists the commands")
        return True


def terminal_line() -> str:
    """Read a line with editing and history where there are; raises `EOFError` at Ctrl-D."""
    with suppress(ImportError):
        import readline  # noqa: F401  # importing it gives input() line editing and history
    if sys.stdout.isatty():
        return input(PROMPT)
    # input() would write its prompt among the answers.
    print(PROMPT, end="", file=sys.stderr, flush=True)
    return input()


@contextmanager
def _ctrl_c_stops(pieces: TextStream) -> Iterator[None]:
    """Let Ctrl-C stop `pieces` between two tokens, so that nothing is torn; a second one raises KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None or before is signal.SIG_IGN:
        yield  # signals are not ours to handle
        return

    def stop(_signum: int, _frame: FrameType | None) -> None:
        if pieces.stop_requested:
            raise KeyboardInterrupt
        pieces.stop()

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
