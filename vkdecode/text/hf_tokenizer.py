"""Loads the tokenizer of a Hugging Face folder, its special tokens and its chat templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from vkdecode.errors import ModelFileError, TokenizerError
from vkdecode.text.chat_template import ChatTemplate
from vkdecode.text.tokenizer import SpecialTokens, Tokenizer
from vkdecode.weights import WeightSource
from vkdecode.weights.jsonfile import read_json_object, read_text

_MAX_TOKENIZER_BYTES = 256 << 20
_PROBE = "a"


def hf_tokenizer(source: WeightSource) -> Tokenizer:
    """Load the tokenizer of a folder; `TokenizerError` when tokenizer.json is missing or damaged."""
    folder = source.path
    backend = _read_backend(folder)
    try:
        config = _read_config(folder)
        templates = _read_templates(folder, config)
    except ModelFileError as error:
        raise TokenizerError(str(error)) from error
    texts = _token_texts(config)
    special = _special_tokens(backend, config, texts, source)
    return Tokenizer(
        backend,
        special,
        chat_template=ChatTemplate(templates, texts, str(folder)) if templates else None,
        min_vocab_size=_vocab_size(source.config),
        where=str(folder),
    )


def special_token_texts(source: WeightSource) -> dict[str, str]:
    """The special tokens that a folder's tokenizer_config.json names, such as "eos_token"; raises `ModelFileError`."""
    return _token_texts(_read_config(source.path))


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json_object(path) if path.exists() else {}


def _token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    return {key: text for key, value in config.items() if key.endswith("_token") and (text := _token_text(value))}


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        others = [name for name in ("tokenizer.model", "vocab.json", "spiece.model") if (folder / name).exists()]
        found = f", only {others[0]}" if others else ""
        raise TokenizerError(f"{folder} has no tokenizer.json{found}; add it, or use token ids")
    try:
        text = read_text(path, _MAX_TOKENIZER_BYTES)
    except ModelFileError as error:
        raise TokenizerError(str(error)) from error
    try:
        return tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # the library raises plain Exception, and its panics are not even that
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise TokenizerError(f"{path} is not a sound tokenizer file: {' '.join(str(error).split())}") from error


def _token_text(value: Any) -> str | None:
    """The text of a special token, which configs write as a string or as an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], texts: Mapping[str, str], source: WeightSource
) -> SpecialTokens:
    bos = backend.token_to_id(texts["bos_token"]) if "bos_token" in texts else None
    if bos is None:
        bos = next(_ids(source.config.get("bos_token_id"), "bos_token_id", source), None)
    eos = backend.token_to_id(texts["eos_token"]) if "eos_token" in texts else None
    ends = set() if eos is None else {eos}
    for settings in (source.config, source.generation_config):
        ends.update(_ids(settings.get("eos_token_id"), "eos_token_id", source))
    prefix, suffix = _around(backend)
    adds_bos, adds_eos = config.get("add_bos_token"), config.get("add_eos_token")
    if adds_bos is False:
        prefix = tuple(token for token in prefix if token != bos)
    elif adds_bos is True and bos not in prefix:
        prefix = (_required(bos, "add_bos_token", source), *prefix)
    if adds_eos is False:
        suffix = tuple(token for token in suffix if token != eos)
    elif adds_eos is True and eos not in suffix:
        suffix = (*suffix, _required(eos, "add_eos_token", source))
    return SpecialTokens(bos, frozenset(ends), prefix, suffix)


def _around(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer's own post-processor puts before and after a text, found by encoding one."""
    plain = backend.encode(_PROBE, add_special_tokens=False).ids
    full = backend.encode(_PROBE, add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    return (), ()


def _required(token: int | None, key: str, source: WeightSource) -> int:
    if token is None:
        raise TokenizerError(
            f"tokenizer_config.json in {source.path} sets {key}, but names no such token of the vocabulary"
        )
    return token


def _ids(value: Any, key: str, source: WeightSource) -> Iterator[int]:
    """Token ids that a config gives as nothing, one number or a list."""
    for token in value if isinstance(value, list) else [value]:
        if token is None:
            continue
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise TokenizerError(f"{key} in the config of {source.path} is {token!r}; a token id is needed")
        yield token


def _vocab_size(config: Mapping[str, Any]) -> int:
    value = config.get("vocab_size")
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; a file of its own wins over tokenizer_config.json, as in transformers."""
    found = _config_templates(folder, config.get("chat_template"))
    for directory in ("chat_templates", "additional_chat_templates"):
        for path in sorted((folder / directory).glob("*.jinja")):
            found[path.stem] = read_text(path)
    main = folder / "chat_template.jinja"
    if main.exists():
        found["default"] = read_text(main)
    return found


def _config_templates(folder: Path, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    pairs = [(entry.get("name"), entry.get("template")) for entry in value] if _is_objects(value) else [(None, None)]
    named = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    if len(named) != len(pairs):
        raise TokenizerError(
            f"chat_template in {folder / 'tokenizer_config.json'} is neither a text nor a list of named texts"
        )
    return named


def _is_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)
