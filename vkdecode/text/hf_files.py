"""Writes the tokenizer of a GGUF file as the files that a Hugging Face folder has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import processors

from vkdecode.text.tokenizer import Tokenizer

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def hf_tokenizer_files(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> dict[str, str]:
    """File names and contents: `tokenizer.json`, `tokenizer_config.json`, `generation_config.json`.

    Args:
        tokenizer: as `load_tokenizer` gives it for the GGUF file.
        metadata: the file's own.

    """
    special = tokenizer.special_tokens
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in _NAMED.items()}
    config: dict[str, Any] = {
        **{name: tokens[index] for name, index in ids.items() if index is not None},
        "add_bos_token": bool(special.prefix),
        "add_eos_token": bool(special.suffix),
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    templates = tokenizer.chat_template.templates if tokenizer.chat_template else {}
    if list(templates) == ["default"]:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    ends = sorted(tokenizer.eos_token_ids, key=lambda token: (token != ids["eos_token"], token))
    generation: dict[str, Any] = {"eos_token_id": ends} if ends else {}
    if special.bos is not None:
        generation["bos_token_id"] = special.bos
    return {
        "tokenizer.json": _with_prefix_and_suffix(tokenizer, tokens),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False),
        "generation_config.json": json.dumps(generation, indent=2),
    }


def _with_prefix_and_suffix(tokenizer: Tokenizer, tokens: list[str]) -> str:
    """The tokenizer with a post-processor that puts the start and end token around a text."""
    special = tokenizer.special_tokens
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    around = [(tokens[index], index) for index in dict.fromkeys((*special.prefix, *special.suffix))]
    if around:
        single = [*(tokens[index] for index in special.prefix), "$A", *(tokens[index] for index in special.suffix)]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=around)
    return str(backend.to_str(pretty=True))
