"""Moving bytes to a device and back, taking and giving back memory, and how fast a device copies."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from vkdecode.doctor.dispatch import generator
from vkdecode.doctor.report import FAULT, NOTE, OK, Finding
from vkdecode.gpu import Algorithm, Device, Recording, Run, Storage, Uploader, read_words, registry
from vkdecode.weights.dtypes import DType

_WORKGROUP = 64
_MIB = 1 << 20


def check_transfer(device: Device, nbytes: int = 5 * _MIB + 4) -> Finding:
    """Random bytes up to device memory and back; more than one piece of an upload, and no whole number of them."""
    sent = generator("transfer").integers(0, 1 << 32, nbytes // 4, np.uint32)
    target = device.allocate(nbytes, DType.U32)
    try:
        _upload(device, target, 0, sent)
        wrong = int((read_words(device, target)[: sent.size] != sent).sum())
    finally:
        target.close()
    if wrong:
        return Finding(FAULT, f"{wrong} of {sent.size} words came back changed", wrong)
    return Finding(OK, "random bytes came back as they were sent", nbytes / _MIB, "MiB")


def check_allocations(device: Device, sizes: Sequence[int] = (_MIB, 16 * _MIB, 64 * _MIB)) -> Finding:
    """Take memory in several sizes at once, use both ends of each, and give it back."""
    before = device.allocated_bytes
    held: list[Storage] = []
    room = device.free_bytes // 4
    try:
        for size in sizes:
            if size > device.largest_buffer_bytes or sum(one.nbytes for one in held) + size > room:
                break
            held.append(device.allocate(size, DType.U32))
        for number, storage in enumerate(held):
            ends = np.full(4, number + 1, np.uint32)
            for start in (0, storage.nbytes - ends.nbytes):
                _upload(device, storage, start, ends)
        for number, storage in enumerate(held):
            words = read_words(device, storage)
            if not ((words[:4] == number + 1).all() and (words[-4:] == number + 1).all()):
                return Finding(FAULT, f"a buffer of {storage.nbytes} bytes does not keep what is written to its ends")
        taken = sum(storage.nbytes for storage in held)
    finally:
        for storage in held:
            storage.close()
    if device.allocated_bytes != before:
        return Finding(FAULT, f"{device.allocated_bytes - before} bytes were not given back")
    if not held:
        return Finding(NOTE, f"nothing was taken: {device.free_bytes} bytes are free")
    return Finding(OK, f"{len(held)} buffers were taken, used at both ends and given back", taken / _MIB, "MiB")


def measure_bandwidth(device: Device, nbytes: int = 32 * _MIB, repeats: int = 5) -> Finding:
    """The best of several copies inside the device's memory, counting bytes read and bytes written."""
    nbytes = min(nbytes, device.largest_buffer_bytes, device.free_bytes // 8) // 16 * 16
    source, target = device.allocate(nbytes, DType.U32), device.allocate(nbytes, DType.U32)
    try:
        # Pages that nothing was written to would be read far too fast on a CPU driver.
        _upload(device, source, 0, np.arange(nbytes // 4, dtype=np.uint32))
        groups = -(-(nbytes // 4) // _WORKGROUP)
        width = min(groups, device.info.limits.max_compute_work_group_count[0])
        shape = (width, -(-groups // width), 1)
        algorithm = Algorithm(device, registry().get("copy_words"), [source, target], {"WORKGROUP": _WORKGROUP}, shape)
        push = {"source_start": 0, "target_start": 0, "count": nbytes // 4}
        times = []
        for _ in range(repeats):
            recording = Recording(device, [Run(algorithm, push)])
            started = time.perf_counter()
            recording.submit()
            times.append(time.perf_counter() - started)
    finally:
        source.close()
        target.close()
    return Finding(
        NOTE, f"copying {nbytes // _MIB} MiB in device memory, for information", 2e-9 * nbytes / min(times), "GB/s"
    )


def _upload(
    device: Device, target: Storage, start: int, values: np.ndarray[tuple[int, ...], np.dtype[np.uint32]]
) -> None:
    uploader = Uploader(device)
    try:
        uploader.write(target, start, values)
    finally:
        uploader.close()
