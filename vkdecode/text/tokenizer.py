"""Text to token ids and back, for one model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from vkdecode.errors import ChatTemplateError, TokenizerError
from vkdecode.text.chat_template import ChatTemplate, Message
from vkdecode.text.stream import ByteStream, PieceReader, StreamDecoder, WindowStream, piece_reader


@dataclass(frozen=True)
class SpecialTokens:
    """Which tokens start and end a text.

    `prefix` and `suffix` are put around an encoded text; `ends` are all tokens at which generation stops.
    """

    bos: int | None = None
    ends: frozenset[int] = field(default_factory=frozenset)
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


class Tokenizer:
    """A model's tokenizer, its special tokens and its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        *,
        chat_template: ChatTemplate | None = None,
        min_vocab_size: int = 0,
        where: str = "this model",
    ) -> None:
        """Wrap a `tokenizers` tokenizer; `min_vocab_size` is the model's, which may be padded beyond it."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special = special
        self._where = where
        self._added: Mapping[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        self._reader = piece_reader(_decoder_json(backend))
        tokens = max([backend.get_vocab_size(with_added_tokens=True), *(token + 1 for token in self._added)])
        self.vocab_size: int = max(tokens, min_vocab_size)
        self.bos_token_id: int | None = special.bos
        self.eos_token_ids: frozenset[int] = special.ends
        self.chat_template: ChatTemplate | None = chat_template
        for token in (special.bos, *special.ends, *special.prefix, *special.suffix):
            if token is not None and not 0 <= token < self.vocab_size:
                raise TokenizerError(f"{where} names {token} as a special token, but has only {self.vocab_size} tokens")

    @property
    def special_tokens(self) -> SpecialTokens:
        """Which tokens start and end a text."""
        return self._special

    def to_json(self) -> str:
        """The whole tokenizer, without prefix and suffix, as a `tokenizer.json` holds it."""
        return str(self._backend.to_str())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; special tokens written out in it count as such.

        With `add_special_tokens` the text starts with exactly one BOS where the model wants one, even if it already has
        some. Raises `TokenizerError` for what is not text.
        """
        ids = self._encode(text)
        if not add_special_tokens:
            return ids
        return self._with_prefix(ids) + list(self._special.suffix)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD."""
        stream = self.stream_decoder(skip_special_tokens=skip_special_tokens)
        if isinstance(stream, WindowStream):
            return self._decode_all([self._check_id(token) for token in ids], skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.finish()])

    def stream_decoder(self, *, skip_special_tokens: bool = True) -> StreamDecoder:
        """Return a decoder for tokens that come one by one."""
        if self._reader is None:
            return WindowStream(lambda ids: self._decode_all(ids, skip_special_tokens))
        return ByteStream(self._token_bytes(self._reader, skip_special_tokens), self._reader.strip)

    def token_piece(self, token_id: int) -> str:
        """Return the text of one token for showing it; bytes that are not UTF-8 by themselves are written as <0xNN>."""
        if self._reader is None:
            return self._backend.id_to_token(self._check_id(token_id)) or ""
        data = self._token_bytes(self._reader, False)(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in data)

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **template_vars: Any
    ) -> str:
        """Return the text of a chat by the model's template; `ChatTemplateError` if there is none or it refuses."""
        if self.chat_template is None:
            raise ChatTemplateError(f"{self._where} has no chat template; give a plain prompt instead")
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt, **template_vars)

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **template_vars: Any
    ) -> list[int]:
        """Return the ids of a chat, with exactly one BOS where the model wants one and nothing after the last token."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **template_vars)
        return self._with_prefix(self._encode(text))

    def _encode(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TokenizerError(f"text to encode must be a string, not {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text has an unpaired surrogate at position {error.start}; it is not Unicode"
            ) from error
        try:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{self._where} cannot encode this text: {_one_line(error)}") from error

    def _with_prefix(self, ids: list[int]) -> list[int]:
        """Put the prefix before ids that may already start with it, or with its BOS several times."""
        prefix = list(self._special.prefix)
        if not prefix:
            return ids
        if self.bos_token_id is not None and prefix == [self.bos_token_id]:
            start = next((index for index, token in enumerate(ids) if token != self.bos_token_id), len(ids))
            return prefix + ids[start:]
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def _token_bytes(self, reader: PieceReader, skip_special: bool) -> Callable[[int], bytes]:
        def read(token_id: int) -> bytes:
            token = self._added.get(self._check_id(token_id))
            if token is not None:
                return b"" if skip_special and token.special else reader.added(token.content)
            piece = self._backend.id_to_token(int(token_id))
            return b"" if piece is None else reader.piece(piece)

        return read

    def _decode_all(self, ids: list[int], skip_special: bool) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=skip_special))

    def _check_id(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens")
        return int(token_id)


def _decoder_json(backend: tokenizers.Tokenizer) -> Mapping[str, Any] | None:
    decoder = backend.decoder
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    return state if isinstance(state, dict) else None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
