"""Every error that vkdecode raises on purpose.

All of them derive from `VkDecodeError`, so a caller needs one `except`. A message is one line: what was wrong, where,
and what to do about it.
"""

from __future__ import annotations


class VkDecodeWarning(UserWarning):
    """Something worth knowing that is no error, such as a device that had to be chosen for want of a better one."""


class VkDecodeError(Exception):
    """Base of every error that the package raises on purpose."""


class ModelFileError(VkDecodeError):
    """A model file is missing, damaged, or not a model."""


class OutputError(VkDecodeError):
    """A file cannot be written: it is there already, the disk is full, or the system refuses."""


class UnsupportedModelError(VkDecodeError):
    """The model is well formed but needs something that vkdecode does not have; the message names it."""


class ConfigError(VkDecodeError):
    """A model configuration contradicts itself or its tensors."""


class TokenizerError(VkDecodeError):
    """A tokenizer cannot be built, or text cannot be turned into tokens."""


class ChatTemplateError(VkDecodeError):
    """A chat template is missing, invalid, or refuses the messages."""


class SamplingError(VkDecodeError):
    """Sampling parameters are out of range."""


class ContextLengthError(VkDecodeError):
    """A request needs more positions than the KV cache holds; nothing was computed."""


class InvalidInputError(VkDecodeError):
    """An argument of a call is out of range or of the wrong shape."""


class DeviceError(VkDecodeError):
    """No usable Vulkan device: no loader, no driver, a wrong ordinal, or a limit that the work exceeds."""


class OutOfDeviceMemoryError(DeviceError):
    """An allocation does not fit the device; what was taken for it has been freed."""


class DeviceLostError(DeviceError):
    """The driver stopped executing; what it was given last is in the message. Open a new device."""


class ShaderError(VkDecodeError):
    """A compiled shader is missing, stale, or used against its declaration."""


class ClosedError(VkDecodeError):
    """A device, model, cache or session was used after it was closed."""


class TopologyChanged(VkDecodeError):
    """The graph was changed after it was optimized; drop the session and build a new one."""


class SymbolConflict(VkDecodeError):
    """A symbol was bound to two different values in one pass."""


class CaptureRefusedError(VkDecodeError):
    """A graph cannot be captured because it holds work that a recorded sequence cannot repeat."""
