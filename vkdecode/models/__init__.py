"""Architectures: which graph a config means, one file for each."""

from vkdecode.models.model import Model, load_model
from vkdecode.models.model_plan import ModelPlan
from vkdecode.models.registry import ARCHITECTURES

__all__ = ["ARCHITECTURES", "Model", "ModelPlan", "load_model"]
