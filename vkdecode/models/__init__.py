"""Architectures: which graph a config means, one file for each."""

from vkdecode.models.memory import MemoryReport
from vkdecode.models.model import Model, load_model
from vkdecode.models.registry import ARCHITECTURES

__all__ = ["ARCHITECTURES", "MemoryReport", "Model", "load_model"]
