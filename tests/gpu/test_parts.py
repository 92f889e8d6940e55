"""Parts of a storage: what they hold, how far they reach, and how long the whole stays allocated."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest

from vkdecode.errors import ClosedError, InvalidInputError, OutOfDeviceMemoryError, ShaderError
from vkdecode.gpu import (
    Algorithm,
    Device,
    Download,
    Recording,
    Run,
    Storage,
    StorageKind,
    Upload,
    Uploader,
    read_words,
    registry,
)
from vkdecode.weights.dtypes import DType


@pytest.fixture
def whole(device: Device) -> Storage:
    """Three units of device-only memory: 1, 2 and 3 in all their words."""
    storage = device.allocate(48, DType.F32)
    uploader = Uploader(device)
    uploader.write(storage, 0, np.repeat(np.arange(1, 4, dtype=np.uint32), 4))
    uploader.close()
    return storage


def test_a_part_is_read_and_written_from_where_it_begins(device: Device, whole: Storage) -> None:
    part = whole.part(16, 16)
    assert read_words(device, part).tolist() == [2] * 4
    uploader = Uploader(device)
    uploader.write(part, 8, np.array([7], np.uint32))
    uploader.close()
    assert read_words(device, whole).tolist() == [1] * 4 + [2, 2, 7, 2] + [3] * 4


def test_a_piece_behind_the_end_of_a_part_is_refused(device: Device, whole: Storage) -> None:
    uploader = Uploader(device)
    with pytest.raises(InvalidInputError, match="do not fit a storage of 16 bytes"):
        uploader.write(whole.part(0, 16), 12, np.zeros(2, np.uint32))
    uploader.close()


def test_a_part_says_that_it_is_one(device: Device, whole: Storage) -> None:
    part = whole.part(32, 4)
    assert part.bundled
    assert not whole.bundled
    assert (part.whole, part.first_byte, part.nbytes) == (whole, 32, 16)
    assert (part.dtype, part.encoding, part.location, part.device) == (DType.F32, "plain", device.location, device)


@pytest.mark.parametrize(("first", "nbytes"), [(8, 16), (-16, 16), (32, 17), (48, 16)])
def test_what_is_no_part_is_refused(whole: Storage, first: int, nbytes: int) -> None:
    with pytest.raises(InvalidInputError, match="not whole units"):
        whole.part(first, nbytes)


def test_a_part_has_no_parts(whole: Storage) -> None:
    with pytest.raises(InvalidInputError, match="has no parts"):
        whole.part(0, 32).part(0, 16)


@pytest.mark.parametrize("kind", [StorageKind.STAGED, StorageKind.HOST])
def test_the_host_sees_a_part_of_what_it_can_see(device: Device, kind: StorageKind) -> None:
    storage = device.allocate(48, DType.U32, kind)
    storage.write(np.arange(12, dtype=np.uint32))
    part = storage.part(16, 20)
    assert (part.kind, part.data.view(np.uint32).tolist()) == (kind, list(range(4, 12)))
    part.write(np.array([70, 80], np.uint32))
    part.words[3] = 90
    with pytest.raises(InvalidInputError, match="36 bytes do not fit a storage of 32"):
        part.write(np.zeros(9, np.uint32))
    assert storage.data.view(np.uint32).tolist() == [0, 1, 2, 3, 70, 80, 6, 90, 8, 9, 10, 11]


def test_parts_travel_with_their_whole(device: Device) -> None:
    """Both to the device and back, and the kernel between them knows only where its parts begin."""
    source, target = (device.allocate(64, DType.F32, StorageKind.STAGED) for _ in range(2))
    source.write(np.arange(16, dtype=np.float32))
    spec = {"WORKGROUP": 8, "COLUMNS": 8, "X_OFFSET": 0, "X_STRIDE": 8}
    given, wanted = ([one.part(first, 32) for first in (0, 32)] for one in (source, target))
    crossed = [
        Run(Algorithm(device, registry().get("contiguize"), [given[at], wanted[1 - at]], spec, (1, 1, 1)))
        for at in (0, 1)
    ]
    recording = Recording(device, [Upload((given[0],)), *crossed, Download((wanted[1],))])
    for more in (0, 100):
        source.write(np.arange(16, dtype=np.float32) + more)
        recording.submit()
        assert (target.data - more).tolist() == [*range(8, 16), *range(8)]


def test_the_memory_is_given_back_with_the_last_part(device: Device) -> None:
    gc.collect()
    before = device.allocated_bytes
    first, second = _two_parts(device)
    del first
    assert device.allocated_bytes == before + 64
    del second  # at once, not when a collection comes
    assert device.allocated_bytes == before


def _two_parts(device: Device) -> tuple[Storage, Storage]:
    whole = device.allocate(64, DType.F32)
    return whole.part(0, 32), whole.part(32, 32)


def test_parts_of_one_size_lie_side_by_side_in_buffers_that_are_not_too_large(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = device.allocate_parts(3, 20, DType.F16, "tiles8")
    assert {one.whole for one in together} == {together[0].whole}
    assert [(one.first_byte, one.nbytes, one.dtype, one.encoding) for one in together] == [
        (first, 32, DType.F16, "tiles8") for first in (0, 32, 64)
    ]
    monkeypatch.setattr("vkdecode.gpu.device._MAX_BYTES_TOGETHER", 64)
    apart = device.allocate_parts(5, 32, DType.F32)
    assert [one.first_byte for one in apart] == [0, 32, 0, 32, 0]
    assert len({one.whole for one in apart}) == 3
    large = device.allocate_parts(2, 96, DType.F32)
    assert [one.first_byte for one in large] == [0, 0]
    assert device.allocate_parts(0, 32, DType.F32) == []


def test_parts_that_do_not_all_fit_leave_nothing_behind(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = device.allocated_bytes
    monkeypatch.setattr("vkdecode.gpu.device._MAX_BYTES_TOGETHER", 64)
    monkeypatch.setattr(device, "info", replace(device.info, heap_bytes=before + 150))
    with pytest.raises(OutOfDeviceMemoryError):
        device.allocate_parts(6, 32, DType.F32)
    assert device.allocated_bytes == before


def test_parts_overlap_where_they_share_bytes(device: Device, whole: Storage) -> None:
    first, second, both = whole.part(0, 16), whole.part(16, 16), whole.part(0, 32)
    assert first.overlaps(first) and first.overlaps(both) and both.overlaps(second) and whole.overlaps(second)
    assert first.overlaps(whole.part(0, 16))
    assert not first.overlaps(second) and not second.overlaps(first)
    assert not first.overlaps(device.allocate(16, DType.F32))


def test_closing_the_whole_closes_its_parts(whole: Storage) -> None:
    part = whole.part(0, 16)
    part.close()
    assert not whole.closed
    other = whole.part(16, 16)
    whole.close()
    with pytest.raises(ClosedError):
        _ = other.tensor


def test_kernels_read_a_part_from_where_it_begins(device: Device, whole: Storage) -> None:
    ids = device.allocate(4, DType.U32, StorageKind.HOST)
    out = device.allocate(16, DType.F32, StorageKind.STAGED)
    weights = device.allocate(2 * 32 * 4 * 4, DType.F32)
    uploader = Uploader(device)
    uploader.write(weights, 0, np.arange(256, dtype=np.float32))
    uploader.close()
    ids.write(np.zeros(1, np.uint32))
    spec = {"WORKGROUP": 32, "TILE": 1, "COLUMNS": 4}
    kernel = registry().get("embed", DTYPE="f32", PART=0)
    for first in (0, 512):
        algorithm = Algorithm(device, kernel, [weights.part(first, 512), ids, out], spec, (1, 1, 1))
        Recording(device, [Run(algorithm), Download((out,))]).submit()
        # Four rows lie side by side, so the first row's words are four apart.
        assert out.data.tolist() == [first / 4 + 4 * column for column in range(4)]


def test_a_kernel_that_knows_no_parts_refuses_one(device: Device, whole: Storage) -> None:
    kernel = registry().get("copy_words")
    target = device.allocate(16, DType.F32)
    Algorithm(device, kernel, [whole.part(0, 16), target], {"WORKGROUP": 64}, (1, 1, 1))
    with pytest.raises(ShaderError, match="cannot bind a part"):
        Algorithm(device, kernel, [whole.part(16, 16), target], {"WORKGROUP": 64}, (1, 1, 1))
