"""Loading a model with its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vkdecode.errors import TokenizerError
from vkdecode.gpu import Device
from vkdecode.models import Model, load_model
from vkdecode.text import load_tokenizer
from vkdecode.weights import open_weights


def load(
    path: str | Path,
    device: Device | int | str | None = None,
    weights: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Load a Hugging Face folder or a `.gguf` file onto a Vulkan device.

    Args:
        path: the folder or file.
        device: an open `Device`, an ordinal of `list_devices()`, a kind (`discrete`, `integrated`, `cpu`), a name or a
            part of it; None for what VKDECODE_DEVICE says, else the best GPU, else the CPU driver with a warning.
        weights: `f32`, `f16`, `bf16`, `q8_0` or `q4_0` to hold matrices so; None holds them as the file does. With
            `q4_0` the embedding and the output head are held as `q8_0`; a matrix whose rows are no multiple of 32 long
            is held at 16 bits instead of a block format. Making a block format loses precision.
        progress: called with bytes uploaded and bytes in all.

    Returns:
        The model. `model.tokenizer` is None where the files hold no usable tokenizer; token ids still work.

    Raises:
        VkDecodeError: the files, the model or the device do not allow it.

    """
    source = open_weights(path)
    try:
        model = load_model(source, device, weights, progress)
        try:
            model.tokenizer = load_tokenizer(source)
        except TokenizerError as error:
            model.tokenizer_error = str(error)
    finally:
        source.close()
    return model
