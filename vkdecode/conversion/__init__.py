"""Writing a model in another format or another type of weights: `convert`."""

from __future__ import annotations

from vkdecode.conversion.convert_model import Converted, convert

__all__ = ["Converted", "convert"]
