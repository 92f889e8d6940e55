"""Text in, tokens out, and back: tokenizers, chat templates and streaming."""

from __future__ import annotations

from vkdecode.text.chat_template import ChatTemplate
from vkdecode.text.gguf_tokenizer import gguf_tokenizer
from vkdecode.text.hf_tokenizer import hf_tokenizer
from vkdecode.text.stream import StreamDecoder
from vkdecode.text.tokenizer import Tokenizer
from vkdecode.weights import GgufFile, WeightSource

__all__ = ["ChatTemplate", "StreamDecoder", "Tokenizer", "load_tokenizer"]


def load_tokenizer(source: WeightSource) -> Tokenizer:
    """Load the tokenizer that comes with a model.

    Raises `TokenizerError` when there is none, or one that cannot be built; the model itself can still be used with
    token ids.
    """
    return gguf_tokenizer(source) if isinstance(source, GgufFile) else hf_tokenizer(source)
