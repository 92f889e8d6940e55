"""Identities that never repeat, and the key that says which model a plan was built for.

Object addresses are recycled, so they prove nothing: both counters here only rise.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from typing import Any, NewType

ModelInstanceId = NewType("ModelInstanceId", int)
KvAllocId = NewType("KvAllocId", int)

_model_instances = itertools.count(1)
_kv_allocations = itertools.count(1)


def new_model_instance_id() -> ModelInstanceId:
    """An id for one loaded model, different from every other of this process."""
    return ModelInstanceId(next(_model_instances))


def new_kv_alloc_id() -> KvAllocId:
    """An id for one KV allocation, different from every other of this process."""
    return KvAllocId(next(_kv_allocations))


def make_shape_key(architecture: str, structure: Mapping[str, Any], instance: ModelInstanceId) -> int:
    """64 bits over what a plan bakes: the architecture, the config values that shape the graph, and whose weights.

    What is bound anew for each token, such as RoPE frequencies, stays out.
    """
    text = json.dumps([architecture, structure, instance], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
