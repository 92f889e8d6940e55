"""How fast a device copies its own memory: by the copy kernel, and by the driver's copy command."""

from __future__ import annotations

import time
from typing import Any

from vkdecode.gpu import Device, StorageKind, copy_algorithm, storage_bytes
from vkdecode.weights.dtypes import DType

BUFFER_BYTES = 256 << 20
_LEAST_BYTES = 1 << 16


def copy_seconds(device: Device, buffer_bytes: int = BUFFER_BYTES, repeats: int = 3) -> tuple[int, dict[str, float]]:
    """Copy one buffer to another on the device, each way several times.

    Args:
        device: whose memory.
        buffer_bytes: bytes to copy; less where limits or a quarter of the free memory, which four buffers share, allow
            no more.
        repeats: copies of each way, of which the fastest counts; one more before them warms up.

    Returns:
        The bytes of one copy, and its seconds by way: `copy_words` (the kernel that fills weights) and, where the
        device has timestamps, `vkCmdCopyBuffer`. Timestamps around the copy leave out the submission and what Kompute
        does on the host after it; without them, the kernel's seconds are those of the whole submission.

    Raises:
        OutOfDeviceMemoryError: not even small buffers fit.

    """
    nbytes = min(buffer_bytes, device.largest_buffer_bytes, device.free_bytes // 16)
    nbytes = storage_bytes(max(nbytes // 16 * 16, _LEAST_BYTES))
    made = []
    try:
        for _ in range(2):
            made.append(device.allocate(nbytes, DType.U32, StorageKind.STAGED))
        algorithm = copy_algorithm(device, made[0], made[1], nbytes // 4)
        push = {"source_start": 0, "target_start": 0, "count": nbytes // 4}
        found = {"copy_words": _seconds(device, algorithm.operation(push), repeats)}
        if device.info.timestamp_nanoseconds > 0:
            copy = device.kp.OpTensorCopy([storage.tensor for storage in made])
            found["vkCmdCopyBuffer"] = _seconds(device, copy, repeats)
        return nbytes, found
    finally:
        for storage in made:
            storage.close()


def _seconds(device: Device, operation: Any, repeats: int) -> float:
    tick = device.info.timestamp_nanoseconds * 1e-9
    times = []
    with device.lock:
        sequence: Any = device.manager.sequence(0, 2 if tick else 0)
        sequence.record(operation)
        for _ in range(repeats + 1):
            started = time.perf_counter()
            sequence.eval()
            spent = time.perf_counter() - started
            if tick:
                first, last = sequence.get_timestamps()[:2]
                spent = max(last - first, 1) * tick
            times.append(spent)
    return min(times[1:])
