"""Language models on any Vulkan GPU.

The decode step is planned, optimized and recorded once, then re-submitted for every token. Everything a user needs is
named here; names that need a device are imported when they are first used, so that `import vkdecode` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vkdecode.conversation import Conversation
from vkdecode.errors import (
    CaptureRefusedError,
    ChatTemplateError,
    ClosedError,
    ConfigError,
    ContextLengthError,
    DeviceError,
    DeviceLostError,
    InvalidInputError,
    ModelFileError,
    OutOfDeviceMemoryError,
    OutputError,
    SamplingError,
    ShaderError,
    SymbolConflict,
    TokenizerError,
    TopologyChanged,
    UnsupportedModelError,
    VkDecodeError,
    VkDecodeWarning,
)
from vkdecode.generate import generate, stream
from vkdecode.sampling import SamplingParams
from vkdecode.token_loop import Generation

if TYPE_CHECKING:
    from vkdecode.conversion import Converted, convert
    from vkdecode.decode import (
        CapturedDecodeSession,
        DecodeMode,
        DecodeSession,
        DecodeTokenData,
        InferenceContext,
        KvAllocId,
        KvCache,
        KvLayer,
        KvRebindSource,
        MemoryReport,
        PlanValidity,
        RebindRefusal,
    )
    from vkdecode.gpu import Device, DeviceInfo, DeviceLocation, Storage, list_devices
    from vkdecode.graph import SymEnv, SymId
    from vkdecode.loading import load
    from vkdecode.models import Model

# The one place that names the version; the packages take it from here.
__version__ = "0.1.0"

_LAZY = {
    "vkdecode.conversion": ("Converted", "convert"),
    "vkdecode.decode": (
        "CapturedDecodeSession",
        "DecodeMode",
        "DecodeSession",
        "DecodeTokenData",
        "InferenceContext",
        "KvAllocId",
        "KvCache",
        "KvLayer",
        "KvRebindSource",
        "MemoryReport",
        "PlanValidity",
        "RebindRefusal",
    ),
    "vkdecode.gpu": ("Device", "DeviceInfo", "DeviceLocation", "Storage", "list_devices"),
    "vkdecode.graph": ("SymEnv", "SymId"),
    "vkdecode.loading": ("load",),
    "vkdecode.models": ("Model",),
}
_HOME = {name: module for module, names in _LAZY.items() for name in names}

__all__ = [
    "CaptureRefusedError",
    "CapturedDecodeSession",
    "ChatTemplateError",
    "ClosedError",
    "ConfigError",
    "ContextLengthError",
    "Conversation",
    "Converted",
    "DecodeMode",
    "DecodeSession",
    "DecodeTokenData",
    "Device",
    "DeviceError",
    "DeviceInfo",
    "DeviceLocation",
    "DeviceLostError",
    "Generation",
    "InferenceContext",
    "InvalidInputError",
    "KvAllocId",
    "KvCache",
    "KvLayer",
    "KvRebindSource",
    "MemoryReport",
    "Model",
    "ModelFileError",
    "OutOfDeviceMemoryError",
    "OutputError",
    "PlanValidity",
    "RebindRefusal",
    "SamplingError",
    "SamplingParams",
    "ShaderError",
    "Storage",
    "SymEnv",
    "SymId",
    "SymbolConflict",
    "TokenizerError",
    "TopologyChanged",
    "UnsupportedModelError",
    "VkDecodeError",
    "VkDecodeWarning",
    "__version__",
    "convert",
    "generate",
    "list_devices",
    "load",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vkdecode' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
