"""Builds a tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from vkdecode.errors import TokenizerError
from vkdecode.text.chat_template import ChatTemplate
from vkdecode.text.pretokenizers import pre_tokenizer
from vkdecode.text.tokenizer import SpecialTokens, Tokenizer
from vkdecode.weights import GgufFile

# Token types of the GGUF specification.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_MARK = "▁"

_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "<｜end▁of▁sentence｜>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
    )
)
"""Tokens that end a text or a turn whatever else the file says, as in llama.cpp: older files name only one end."""
_HARMONY = frozenset({"<|return|>", "<|call|>"})
_HARMONY_MESSAGE_END = "<|end|>"
"""Where a vocabulary has both of `_HARMONY` this one ends a message of several, not the turn."""
_KEPT_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""The only special tokens of Phi 3's SentencePiece vocabulary that do not swallow the white space behind them."""


class _Vocabulary:
    """Tokens, types and scores of a GGUF file, checked."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._metadata = metadata
        tokens = self.get("tokens")
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
            raise TokenizerError(
                f"{where} has no list tokenizer.ggml.tokens; use token ids, or convert the model again"
            )
        self.tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise TokenizerError(f"{where} has the token {twice!r} twice in tokenizer.ggml.tokens")
        self.types = self._numbers("token_type", "iu", _NORMAL)

    @property
    def architecture(self) -> str:
        """The model's GGUF architecture, "" where there is none."""
        return str(self._metadata.get("general.architecture", ""))

    def with_plain_spaces(self) -> None:
        """Write the spaces of user-defined tokens as spaces, for they are matched in text as it is."""
        for index in self.of_type(_USER_DEFINED):
            plain = self.tokens[index].replace(_MARK, " ")
            if plain not in self.ids:
                del self.ids[self.tokens[index]]
                self.tokens[index] = plain
                self.ids[plain] = index

    def get(self, key: str) -> Any:
        """A value of the `tokenizer.ggml.` metadata, or None."""
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def flag(self, key: str, default: bool) -> bool:
        """A true or false value."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise TokenizerError(f"tokenizer.ggml.{key} of {self.where} is {value!r}; true or false is needed")
        return value

    def token_id(self, key: str) -> int | None:
        """The id of a special token, or None where the file names none."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise TokenizerError(f"tokenizer.ggml.{key} of {self.where} is {value!r}; it has {len(self.tokens)} tokens")
        return value

    def scores(self) -> list[float]:
        """Scores of all tokens."""
        return self._numbers("scores", "f", None)

    def of_type(self, *types: int) -> list[int]:
        """Ids of the tokens of the given types."""
        return [index for index, kind in enumerate(self.types) if kind in types]

    def merges(self) -> list[tuple[str, str]]:
        """The pairs that byte-level BPE merges, the first ones first."""
        merges = self.get("merges")
        if not isinstance(merges, list):
            raise TokenizerError(f"{self.where} has no list tokenizer.ggml.merges, which a gpt2 tokenizer needs")
        return [self._split(merge) for merge in merges]

    def _split(self, merge: object) -> tuple[str, str]:
        at = merge.find(" ", 1) if isinstance(merge, str) else -1
        if not isinstance(merge, str) or at < 0 or at + 1 == len(merge):
            raise TokenizerError(f"tokenizer.ggml.merges of {self.where} has {merge!r}, which is not a pair of tokens")
        return merge[:at], merge[at + 1 :]

    def _numbers(self, key: str, kinds: str, default: float | None) -> list[Any]:
        value = self.get(key)
        if value is None and default is not None:
            return [default] * len(self.tokens)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or len(value) < len(self.tokens):
            raise TokenizerError(f"tokenizer.ggml.{key} of {self.where} does not give a number for each token")
        return list(value[: len(self.tokens)].tolist())


def gguf_tokenizer(source: GgufFile) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes; `TokenizerError` when it has none or one of an unknown kind."""
    return metadata_tokenizer(source.metadata, source.config["vocab_size"], str(source.path))


def metadata_tokenizer(metadata: Mapping[str, Any], vocab_size: int, where: str) -> Tokenizer:
    """Build the tokenizer of GGUF metadata for a model of `vocab_size` tokens; raises like `gguf_tokenizer`."""
    kind = metadata.get("tokenizer.ggml.model")
    build = _KINDS.get(kind) if isinstance(kind, str) else None
    if build is None:
        problem = "no tokenizer" if kind is None else f"a tokenizer of the kind {kind!r}, which is not supported"
        raise TokenizerError(
            f"{where} has {problem}; supported: {', '.join(_KINDS)}; token ids can be used without one"
        )
    vocabulary = _Vocabulary(metadata, where)
    try:
        backend, adds_bos = build(vocabulary)
        _add_tokens(backend, vocabulary)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"the tokenizer in {where} cannot be built: {' '.join(str(error).split())}") from error
    special = _special_tokens(vocabulary, adds_bos)
    return Tokenizer(
        backend,
        special,
        chat_template=_chat_template(metadata, vocabulary, special),
        min_vocab_size=vocab_size,
        where=where,
    )


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE: merges in their order, on the bytes of pieces that the named pre-tokenizer cuts."""
    name = vocabulary.get("pre")
    rules = pre_tokenizer(None if name is None else str(name), vocabulary.architecture, vocabulary.where)
    model = models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges(), ignore_merges=rules.whole_words)
    backend = tokenizers.Tokenizer(model)
    normalizer = rules.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rules.build()
    backend.decoder = decoders.ByteLevel()
    return backend, rules.adds_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE: of all neighbours, those whose joint piece has the highest score merge first."""
    vocabulary.with_plain_spaces()
    unknown = vocabulary.of_type(_UNKNOWN)
    has_bytes = all(f"<0x{byte:02X}>" in vocabulary.ids for byte in range(256))
    if not has_bytes and not unknown:
        raise TokenizerError(
            f"{vocabulary.where} has neither byte tokens nor an unknown token for text it does not know"
        )
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=score_merges(vocabulary.tokens, vocabulary.scores(), vocabulary.of_type(_NORMAL)),
        unk_token=vocabulary.tokens[unknown[0]] if unknown else None,
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", _MARK)
    prefix = vocabulary.flag("add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_MARK), spaces] if prefix else [spaces])
    steps: list[decoders.Decoder] = [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend, True


def score_merges(tokens: Sequence[str], scores: Sequence[float], normal: Sequence[int]) -> list[tuple[str, str]]:
    """List all pairs of pieces that make a piece, those of the highest score first.

    `normal` are the ids of the pieces that take part; the others (control, byte, user-defined) never come from a merge.
    """
    pieces = {tokens[index] for index in normal}
    ranked = sorted((index for index in normal if len(tokens[index]) > 1), key=lambda index: (-scores[index], index))
    return [
        (tokens[index][:cut], tokens[index][cut:])
        for index in ranked
        for cut in range(len(tokens[index]) - 1, 0, -1)
        if tokens[index][:cut] in pieces and tokens[index][cut:] in pieces
    ]


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Tell the tokenizer which tokens are matched as a whole in the text, before it is cut."""
    ends = {index for token, index in vocabulary.ids.items() if token in _ENDS}
    control = [index for index, kind in enumerate(vocabulary.types) if kind in (_CONTROL, _UNKNOWN) or index in ends]
    user = [index for index in vocabulary.of_type(_USER_DEFINED) if index not in ends]
    backend.add_special_tokens([_added(vocabulary, index) for index in control])
    backend.add_tokens([_added(vocabulary, index) for index in user])


def _added(vocabulary: _Vocabulary, index: int) -> AddedToken:
    """A token that is matched as a whole; files do not say whether it takes white space with it, Phi 3's do."""
    token = vocabulary.tokens[index]
    phi3 = vocabulary.architecture == "phi3" and vocabulary.get("model") == "llama"
    return AddedToken(token, normalized=False, rstrip=phi3 and token not in _KEPT_SPACE)


def _special_tokens(vocabulary: _Vocabulary, adds_bos: bool) -> SpecialTokens:
    bos, eos = vocabulary.token_id("bos_token_id"), vocabulary.token_id("eos_token_id")
    named = [vocabulary.token_id(key) for key in ("eot_token_id", "eom_token_id")]
    texts = _ENDS - {_HARMONY_MESSAGE_END} if vocabulary.ids.keys() >= _HARMONY else _ENDS
    by_text = [vocabulary.ids[token] for token in texts if token in vocabulary.ids]
    ends = frozenset(index for index in [eos, *named, *by_text] if index is not None)
    adds_bos = vocabulary.flag("add_bos_token", adds_bos)
    adds_eos = vocabulary.flag("add_eos_token", False)
    if (adds_bos and bos is None) or (adds_eos and eos is None):
        raise TokenizerError(f"{vocabulary.where} wants a start or end token around texts, but does not say which")
    return SpecialTokens(
        bos=bos,
        ends=ends,
        prefix=(bos,) if adds_bos and bos is not None else (),
        suffix=(eos,) if adds_eos and eos is not None else (),
    )


def _chat_template(metadata: Mapping[str, Any], vocabulary: _Vocabulary, special: SpecialTokens) -> ChatTemplate | None:
    """The templates `tokenizer.chat_template` and `tokenizer.chat_template.<name>`."""
    main = "tokenizer.chat_template"
    found = {
        key.removeprefix(main).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if (key == main or key.startswith(f"{main}.")) and isinstance(value, str)
    }
    if not found:
        return None
    ids = {"bos_token": special.bos, "eos_token": vocabulary.token_id("eos_token_id")}
    ids.update(
        {"unk_token": vocabulary.token_id("unknown_token_id"), "pad_token": vocabulary.token_id("padding_token_id")}
    )
    texts = {name: vocabulary.tokens[index] for name, index in ids.items() if index is not None}
    return ChatTemplate(found, texts, vocabulary.where)


_KINDS: Mapping[str, Callable[[_Vocabulary], tuple[tokenizers.Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
