"""Storages with the bytes of others, for replacing a cache's layers without changing what the cache holds."""

from __future__ import annotations

import numpy as np
from poison import poison_storages

from vkdecode.decode import KvCache, KvLayer
from vkdecode.gpu import Device, Storage, Uploader
from vkdecode.gpu.transfer import read_words


def fresh_copy(device: Device, source: Storage) -> Storage:
    """A new storage of this package with the same bytes."""
    return _filled(device, device.allocate_parts(1, source.nbytes, source.dtype)[0], source)


def outside_copy(device: Device, source: Storage) -> Storage:
    """A tensor made behind the package's back, with the same bytes; nothing proves where it lives."""
    tensor = device.manager.tensor_t(np.zeros(source.nbytes // 4, np.float32), device.kp.TensorTypes.storage)
    return _filled(device, Storage.from_tensor(tensor, source.dtype), source)


def replace_layer(device: Device, kv: KvCache, index: int, outside: bool = False) -> None:
    """Put copies into a layer of a cache and poison what was there."""
    old = kv.layers[index]
    copy = outside_copy if outside else fresh_copy
    kv.set_layer(index, KvLayer(copy(device, old.k), copy(device, old.v)))
    poison_storages(device, old.k, old.v)


def _filled(device: Device, target: Storage, source: Storage) -> Storage:
    uploader = Uploader(device)
    uploader.write(target, 0, read_words(device, source))
    uploader.close()
    return target
