"""Pre-tokenizers of byte-level BPE models, under the names that GGUF files give them in `tokenizer.ggml.pre`.

How text is cut before merging is not in a GGUF file, only a name; the rules are those of the original `tokenizer.json`
files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from vkdecode.errors import TokenizerError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_REST}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_REST_SLASH}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTION}?|{_CASED[1]}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_REST_SLASH}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class PreTokenizer:
    """How one family of byte-level BPE tokenizers cuts text.

    `patterns` cut one after another, each match a piece of its own. `whole_words` takes a piece that is in the
    vocabulary as it is, without merging. `adds_bos` is what the family does where the file does not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        """What is done to text before it is cut."""
        return normalizers.NFC() if self.composes else None

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Build the cutting, and the writing of bytes as characters, for `tokenizers`."""
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2_STYLE = PreTokenizer((_GPT2,))
_DIGIT_STYLE = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_STYLE = PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True)
_QWEN2_STYLE = PreTokenizer((_QWEN2,), composes=True)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": _GPT2_STYLE,
    "phi-2": _GPT2_STYLE,
    "mellum": _GPT2_STYLE,
    "olmo": PreTokenizer((_GPT2,), composes=True),
    "mpt": PreTokenizer((_GPT2,), composes=True),
    "smollm": _DIGIT_STYLE,
    "starcoder": _DIGIT_STYLE,
    "refact": _DIGIT_STYLE,
    "command-r": PreTokenizer((r"\p{N}", _GPT2), composes=True),
    "minerva-7b": _DIGIT_STYLE,
    "codeshell": _DIGIT_STYLE,
    "llama-bpe": _LLAMA3_STYLE,
    "llama3": _LLAMA3_STYLE,
    "llama-v3": _LLAMA3_STYLE,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "qwen2": _QWEN2_STYLE,
    "deepseek-r1-qwen": _QWEN2_STYLE,
    "megrez": _QWEN2_STYLE,
    "stablelm2": _QWEN2_STYLE,
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,)),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
}

_OF_ARCHITECTURE: Mapping[str, str] = {
    "gpt2": "gpt-2",
    "phi2": "phi-2",
    "gptneox": "olmo",
    "starcoder2": "starcoder",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "stablelm": "stablelm2",
    "command-r": "command-r",
}
"""What the models of an architecture share, for files from before the name was written into them."""


def pre_tokenizer(name: str | None, architecture: str, where: str) -> PreTokenizer:
    """Return the rules of a name, or of an architecture where a file gives none or calls it `default`.

    Raises:
        TokenizerError: the name is unknown, or there is none and the architecture's models differ.

    """
    if name is None or name == "default":
        name = _OF_ARCHITECTURE.get(architecture)
        if name is None:
            raise TokenizerError(
                f"{where} does not say in tokenizer.ggml.pre how its tokenizer cuts text; "
                "convert the model again with a current llama.cpp"
            )
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        raise TokenizerError(
            f"{where} needs the pre-tokenizer {name!r}, which is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    return found
