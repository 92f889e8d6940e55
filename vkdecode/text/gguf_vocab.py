"""Writes the tokenizer of a Hugging Face folder as GGUF metadata, and proves that it then cuts text the same way.

A GGUF file holds tokens, types, merges or scores, and only a name for how text is cut before merging. The name is
found by cutting `PROBES` by each set of rules that is known; the whole is read back and encodes them once more.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from gguf.constants import GGUFValueType, TokenType

from vkdecode.errors import TokenizerError, VkDecodeWarning
from vkdecode.text.gguf_tokenizer import metadata_tokenizer
from vkdecode.text.pretokenizers import PRE_TOKENIZERS
from vkdecode.text.tokenizer import Tokenizer
from vkdecode.weights.gguf_writer import MetaEntry, entry, plain_values

PROBES = (
    "Hello, World! It's 12345678 o'clock; they'LL say I'd've won't DON'T.",
    "  two  spaces   three\n\n\nlines \n \t tabs\t\tand\r\nreturns  ",
    "for (int i=0; i<=10; ++i) { a[i] = b->c * 3.14e-10; } // комментарий/\n#include <x.h>\n",
    "Größe naïve cafe\u0301 e\u0301 ÀÉ Straße ЁЖ АБВгд ελληνικά עברית العربية हिन्दी ไทย",
    "日本語のテキスト 中文，标点。 한국어 １２３ ٣٤٥ ½ Ⅷ",
    "🙂🚀 👩\u200d👩\u200d👧 \u200b \ufeff \xa0x HelloWorld camelCaseTEST_snake ABCdef don’t «q» … — ~`@#$%^&*()",
    " leading", "\nx", "", "a", "'s", "\u2581a \u2581",
)  # fmt: skip
_MARK = "▁"
_AROUND = ("lstrip", "rstrip", "single_word")


def gguf_vocabulary(
    tokenizer: Tokenizer, texts: Mapping[str, str], vocab_size: int, arch: str, where: str
) -> dict[str, MetaEntry]:
    """The `tokenizer.` metadata of a Hugging Face tokenizer.

    Args:
        tokenizer: as `load_tokenizer` gives it.
        texts: the special tokens that its files name, such as "eos_token".
        vocab_size: rows of the model's embedding; tokens that are missing are filled up.
        arch: the GGUF architecture of the model, on which some of how a file is read depends.
        where: names the model in errors.

    Raises:
        TokenizerError: it is of a kind that GGUF files do not have, or does not survive the change.

    """
    state = json.loads(tokenizer.to_json())
    byte_level = _mentions(state.get("decoder"), "ByteLevel")
    if state["model"].get("type") != "BPE" or not (byte_level or _mentions(state.get("decoder"), _MARK)):
        raise TokenizerError(
            f"the tokenizer of {where} ({state['model'].get('type')}) is neither byte-level nor SentencePiece BPE; "
            "GGUF files of other kinds are not written"
        )
    vocabulary = _Vocabulary(state, vocab_size, arch, where)
    metadata = vocabulary.byte_level() if byte_level else vocabulary.sentencepiece()
    metadata.update(_special(tokenizer, texts, vocabulary))
    for name, template in (tokenizer.chat_template.templates if tokenizer.chat_template else {}).items():
        metadata["tokenizer.chat_template" + ("" if name == "default" else f".{name}")] = entry(template)
    metadata.update(_further_ends(tokenizer, vocabulary.read_back(metadata), where))
    _check_same(tokenizer, metadata, vocabulary, with_special=byte_level)
    return metadata


class _Vocabulary:
    """Tokens with their types, and what differs between the two kinds of BPE."""

    def __init__(self, state: Mapping[str, Any], vocab_size: int, arch: str, where: str) -> None:
        self.where = where
        self._arch = arch
        self.state = state
        self.model: Mapping[str, Any] = state["model"]
        self.added: Sequence[Mapping[str, Any]] = state.get("added_tokens") or []
        pieces = {token["id"]: token["content"] for token in self.added}
        pieces.update({index: piece for piece, index in self.model["vocab"].items() if index not in pieces})
        if pieces and max(pieces) >= vocab_size:
            raise TokenizerError(
                f"the tokenizer of {where} has the token {max(pieces)}, but the model only {vocab_size} embeddings"
            )
        self.tokens = [pieces.get(index, f"[PAD{index}]") for index in range(vocab_size)]
        self.types = [TokenType.NORMAL if index in pieces else TokenType.UNUSED for index in range(vocab_size)]
        for token in self.added:
            self.types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != vocab_size:
            raise TokenizerError(f"the tokenizer of {where} has one token under two numbers")

    def read_back(self, metadata: Mapping[str, MetaEntry]) -> Tokenizer:
        """The tokenizer that a reader of the file will build."""
        values = {"general.architecture": self._arch, **plain_values(metadata)}
        return metadata_tokenizer(values, len(self.tokens), self.where)

    def byte_level(self) -> dict[str, MetaEntry]:
        """Metadata of byte-level BPE."""
        if not self.model["merges"]:
            raise TokenizerError(f"the tokenizer of {self.where} has no merges, without which GGUF files have none")
        return {
            "tokenizer.ggml.model": entry("gpt2"),
            "tokenizer.ggml.pre": entry(self._pre_tokenizer()),
            **self._common(),
            "tokenizer.ggml.merges": entry([" ".join(self._pair(merge)) for merge in self.model["merges"]]),
        }

    def sentencepiece(self) -> dict[str, MetaEntry]:
        """Metadata of SentencePiece BPE; the scores only say in which order pieces are made, as merges do."""
        unknown = self.model.get("unk_token")
        if unknown in self.ids:
            self.types[self.ids[unknown]] = TokenType.UNKNOWN
        for byte in range(256):
            index = self.ids.get(f"<0x{byte:02X}>")
            if index is not None and self.model.get("byte_fallback"):
                self.types[index] = TokenType.BYTE
        merges = self.model["merges"]
        scores: list[float] = [-float(len(merges) + 1)] * len(self.tokens)
        for rank in range(len(merges) - 1, -1, -1):
            index = self.ids.get("".join(merges[rank]))
            if index is not None:
                scores[index] = -float(rank)
        prefix = _mentions(self.state.get("normalizer"), "Prepend") or _mentions_prefix(self.state)
        return {
            "tokenizer.ggml.model": entry("llama"),
            "tokenizer.ggml.pre": entry("default"),
            **self._common(),
            "tokenizer.ggml.scores": MetaEntry(scores, (GGUFValueType.ARRAY, GGUFValueType.FLOAT32)),
            "tokenizer.ggml.add_space_prefix": entry(prefix),
        }

    def _common(self) -> dict[str, MetaEntry]:
        types = [int(kind) for kind in self.types]
        return {
            "tokenizer.ggml.tokens": entry(self.tokens),
            "tokenizer.ggml.token_type": MetaEntry(types, (GGUFValueType.ARRAY, GGUFValueType.INT32)),
        }

    def _pair(self, merge: Sequence[str]) -> Sequence[str]:
        if any(" " in part for part in merge):
            raise TokenizerError(
                f"the tokenizer of {self.where} merges {list(merge)!r}; GGUF merges cannot hold spaces"
            )
        return merge

    def _pre_tokenizer(self) -> str:
        """The first name whose rules cut the probes as this tokenizer does."""
        backend = tokenizers.Tokenizer.from_str(json.dumps({**self.state, "added_tokens": [], "post_processor": None}))
        wanted = [_cut(backend.normalizer, backend.pre_tokenizer, probe) for probe in PROBES]
        for name, rules in PRE_TOKENIZERS.items():
            if rules.whole_words != bool(self.model.get("ignore_merges")):
                continue
            normalizer, pre_tokenizer = rules.normalizer(), rules.build()
            if [_cut(normalizer, pre_tokenizer, probe) for probe in PROBES] == wanted:
                return name
        raise TokenizerError(
            f"the tokenizer of {self.where} cuts text in a way that no known GGUF pre-tokenizer does; "
            f"known: {', '.join(PRE_TOKENIZERS)}"
        )


def _cut(normalizer: Any, pre_tokenizer: Any, text: str) -> list[str]:
    normal = normalizer.normalize_str(text) if normalizer is not None else text
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(normal)] if pre_tokenizer is not None else [normal]


def _mentions(part: Any, text: str) -> bool:
    return part is not None and f'"{text}"' in json.dumps(part, ensure_ascii=False)


def _mentions_prefix(state: Mapping[str, Any]) -> bool:
    """Whether a Metaspace step puts a space before a text: "first" is read as llama.cpp does, as before each part."""
    found = json.dumps(state.get("pre_tokenizer") or {})
    return '"Metaspace"' in found and '"never"' not in found


def _special(tokenizer: Tokenizer, texts: Mapping[str, str], vocabulary: _Vocabulary) -> dict[str, MetaEntry]:
    special = tokenizer.special_tokens
    named = {key: vocabulary.ids[text] for key, text in texts.items() if text in vocabulary.ids}
    eos = named.get("eos_token", min(special.ends, default=None))
    ids = {
        "bos_token_id": special.bos,
        "eos_token_id": eos,
        "unknown_token_id": named.get("unk_token"),
        "padding_token_id": named.get("pad_token"),
    }
    around = {"add_bos_token": (special.prefix, special.bos), "add_eos_token": (special.suffix, eos)}
    for key, (found, token) in around.items():
        if found not in ((), (token,)):
            raise TokenizerError(
                f"the tokenizer of {vocabulary.where} puts the tokens {list(found)} around a text; "
                f"GGUF files can only say {key}"
            )
    entries = {key: entry(value) for key, value in ids.items() if value is not None}
    entries.update({key: entry(bool(found)) for key, (found, _) in around.items()})
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items()}


def _further_ends(tokenizer: Tokenizer, read: Tokenizer, where: str) -> dict[str, MetaEntry]:
    """Names for the tokens at which generation stops and that a reader would not know of, as far as there are keys."""
    more = sorted(tokenizer.eos_token_ids - read.eos_token_ids)
    if more[2:]:
        warnings.warn(
            f"{where} ends texts at more tokens than GGUF files can name; left out: {more[2:]}",
            VkDecodeWarning,
            stacklevel=3,
        )
    keys = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return {key: entry(token) for key, token in zip(keys, more, strict=False)}


def _check_same(
    tokenizer: Tokenizer, metadata: dict[str, MetaEntry], vocabulary: _Vocabulary, *, with_special: bool
) -> None:
    """Encode the probes both ways; special tokens inside a text only where no space may be put after them."""
    read = vocabulary.read_back(metadata)
    _warn_of_spaces(vocabulary, json.loads(read.to_json())["added_tokens"])
    plain = [token["content"] for token in vocabulary.added if not any(token[key] for key in _AROUND)]
    inside = [f"a{token}b" for token in plain[:16]] if with_special else []
    # Metaspace puts no space before one that is there; SentencePiece itself, and what reads GGUF files, does.
    metaspace = _mentions(vocabulary.state.get("pre_tokenizer"), "Metaspace")
    for probe in (*(probe.lstrip(f" {_MARK}") if metaspace else probe for probe in PROBES), *inside):
        wanted, found = tokenizer.encode(probe), read.encode(probe)
        if wanted != found:
            raise TokenizerError(
                f"the tokenizer of {vocabulary.where} cannot be written to GGUF: "
                f"{probe!r:.40} would become {found[:8]} instead of {wanted[:8]}"
            )


def _warn_of_spaces(vocabulary: _Vocabulary, read: Sequence[Mapping[str, Any]]) -> None:
    """Name the tokens that take in white space, or want word ends, around them, where a reader will not know."""
    known = {token["id"]: token for token in read}
    lost = [
        token["content"]
        for token in vocabulary.added
        if any(token[key] and not known.get(token["id"], {}).get(key) for key in _AROUND)
    ]
    if lost:
        warnings.warn(
            f"the tokens {', '.join(lost[:5])} of {vocabulary.where} take in spaces or want word ends around them, "
            "which GGUF files cannot say",
            VkDecodeWarning,
            stacklevel=4,
        )
