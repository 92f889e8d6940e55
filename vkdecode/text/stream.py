"""Turns token ids back into text, one at a time, never showing part of a character.

Decoding works on bytes: each token stands for some bytes, and the text is their UTF-8 reading in which bytes that are
not UTF-8 become U+FFFD. A stream therefore gives exactly the text that decoding everything at once gives, with constant
work per token.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"


class StreamDecoder(Protocol):
    """Decodes a growing sequence of tokens."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; "" while a character is still open."""
        ...

    def finish(self) -> str:
        """Return what is left at the end: U+FFFD for a character that never became whole, else ""."""
        ...


class ByteStream:
    """A stream over tokens that stand for bytes; drops up to `strip` spaces at the start of the text."""

    def __init__(self, token_bytes: Callable[[int], bytes], strip: int) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = strip

    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""
        return self._trim(self._utf8.decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        """Return U+FFFD for an unfinished character, else ""; the stream can then be used anew for the same text."""
        return self._trim(self._utf8.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(" "):
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class WindowStream:
    """A stream over any decoder, which re-reads the last few tokens to see what a new one adds."""

    _LONGEST_WAIT = 16

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._shown: list[int] = []
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""
        self._waiting.append(token_id)
        added = self._added()
        if not added or (added.endswith("\ufffd") and len(self._waiting) < self._LONGEST_WAIT):
            return ""
        self._shown, self._waiting = self._waiting, []
        return added

    def finish(self) -> str:
        """Return the text that is still held back."""
        added = self._added() if self._waiting else ""
        self._waiting = []
        return added

    def _added(self) -> str:
        return self._decode(self._shown + self._waiting)[len(self._decode(self._shown)) :]


def byte_level_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes for the bytes: printable ones as they are, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(sorted(set(range(256)) - set(printable)))})
    return table


_ALPHABET = byte_level_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level BPE piece; a piece with any other character stands for its own UTF-8."""
    try:
        return bytes(_ALPHABET[char] for char in piece)
    except KeyError:
        return _plain_bytes(piece)


def sentencepiece_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece piece: `<0xNN>` is one byte, the mark U+2581 a space."""
    byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else metaspace_bytes(piece)


def metaspace_bytes(piece: str) -> bytes:
    """Bytes of a piece in which the mark U+2581 is a space and nothing else is special."""
    return piece.replace(_SPACE_MARK, " ").encode("utf-8", "replace")


def _plain_bytes(piece: str) -> bytes:
    return piece.encode("utf-8", "replace")


@dataclass(frozen=True)
class PieceReader:
    """How a vocabulary writes bytes: of its pieces, of tokens added to it, and how many spaces to drop at the start."""

    piece: Callable[[str], bytes]
    added: Callable[[str], bytes]
    strip: int = 0


def piece_reader(decoder: Mapping[str, Any] | None) -> PieceReader | None:
    """Return how to read pieces for the JSON of a `tokenizers` decoder; None if it is not about bytes."""
    kind = None if decoder is None else decoder.get("type")
    if decoder is None or kind is None:
        return None
    if kind == "ByteLevel":
        return PieceReader(byte_level_bytes, _plain_bytes)
    if kind == "Metaspace" and decoder.get("replacement") == _SPACE_MARK:
        return PieceReader(metaspace_bytes, metaspace_bytes, 0 if decoder.get("prepend_scheme") == "never" else 1)
    steps = decoder.get("decoders", []) if kind == "Sequence" else []
    if len(steps) == 1:
        return piece_reader(steps[0])
    return _sentencepiece_reader(steps) if steps else None


def _sentencepiece_reader(steps: list[dict[str, Any]]) -> PieceReader | None:
    mark = {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "}
    if steps[0] != mark or {"type": "Fuse"} not in steps:
        return None
    strip = 0
    piece = metaspace_bytes
    for step in steps[1:]:
        if step["type"] == "ByteFallback":
            piece = sentencepiece_bytes
        elif step["type"] == "Strip" and step.get("content") == " " and not step.get("stop"):
            strip = int(step.get("start", 0))
        elif step["type"] != "Fuse":
            return None
    return PieceReader(piece, metaspace_bytes, strip)
