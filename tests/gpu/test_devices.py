"""Opening devices, accounting for their memory, and closing what lives on them."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterator

import numpy as np
import pytest

from vkdecode.errors import ClosedError, DeviceError, InvalidInputError
from vkdecode.gpu import (
    Algorithm,
    Device,
    DeviceLocation,
    Download,
    Recording,
    Run,
    Storage,
    StorageKind,
    choose_lanes,
    lanes_of,
    list_devices,
    registry,
)
from vkdecode.gpu.self_check import subgroup_check
from vkdecode.weights.dtypes import DType


def cpu_ordinal() -> int:
    return min(list_devices(), key=lambda info: (info.kind != "cpu", info.ordinal)).ordinal


@pytest.fixture
def fresh() -> Iterator[Device]:
    """A device that nothing was allocated on."""
    with Device(cpu_ordinal()) as opened:
        yield opened


def test_devices_are_listed_with_what_plans_need() -> None:
    devices = list_devices()
    assert [info.ordinal for info in devices] == list(range(len(devices)))
    for info in devices:
        assert info.name
        assert info.kind in ("discrete", "integrated", "virtual", "cpu", "other")
        assert info.heap_bytes > 1 << 20
        assert re.fullmatch(r"\d+\.\d+\.\d+", info.api_version)
        # The least that Vulkan guarantees.
        assert info.limits.max_storage_buffer_range_bytes >= 1 << 27
        assert info.limits.max_compute_work_group_invocations >= 128
        assert info.limits.max_push_constants_bytes >= 128
        assert info.subgroup_size > 0


@pytest.mark.parametrize("ordinal", [-1, 1000, True, 0.0, "0", None])
def test_an_ordinal_that_is_none_names_those_there_are(ordinal: object) -> None:
    with pytest.raises(DeviceError, match=f"no Vulkan device with ordinal {ordinal}; devices: 0: "):
        Device(ordinal)  # type: ignore[arg-type] # wrong types are the point


def test_a_device_knows_where_it_is(device: Device) -> None:
    assert device.location == DeviceLocation("vulkan", device.info.ordinal)
    assert str(device.location) == f"vulkan:{device.info.ordinal}"
    assert device.allocate(16, DType.F32).location == device.location


def test_opening_a_device_leaves_the_programs_logging_alone() -> None:
    before = list(logging.getLogger().handlers)
    Device(cpu_ordinal()).close()
    assert logging.getLogger().handlers == before


def test_memory_is_accounted_for_and_given_back(fresh: Device) -> None:
    assert fresh.allocated_bytes == 0
    only = fresh.allocate(33, DType.F32, StorageKind.DEVICE)
    assert only.nbytes == 48
    assert fresh.allocated_bytes == 48
    staged = fresh.allocate(16, DType.U32, StorageKind.STAGED)
    assert fresh.allocated_bytes == 48 + 2 * 16
    host = fresh.allocate(64, DType.U32, StorageKind.HOST)
    assert fresh.allocated_bytes == 48 + 32 + 64
    assert fresh.free_bytes == fresh.info.heap_bytes - 144
    for _ in range(2):
        staged.close()
    assert fresh.allocated_bytes == 48 + 64
    host.close()
    del only
    gc.collect()
    assert fresh.allocated_bytes == 0


def test_kernels_give_back_what_they_held(fresh: Device) -> None:
    def use() -> None:
        source = fresh.allocate(256, DType.U32, StorageKind.HOST)
        target = fresh.allocate(256, DType.U32, StorageKind.STAGED)
        source.data[:] = np.arange(64)
        algorithm = Algorithm(fresh, registry().get("copy_words"), [source, target], {"WORKGROUP": 64}, (1, 1, 1))
        push = {"source_start": 0, "target_start": 0, "count": 64}
        Recording(fresh, [Run(algorithm, push), Download((target,))]).submit()
        assert target.data[63] == 63

    use()
    gc.collect()
    assert fresh.allocated_bytes == 0


def test_a_refused_allocation_takes_nothing(fresh: Device) -> None:
    with pytest.raises(DeviceError):
        fresh.allocate(1 << 40, DType.F32)
    assert fresh.allocated_bytes == 0


def test_closing_is_final_and_may_be_repeated() -> None:
    device = Device(cpu_ordinal())
    storage = device.allocate(64, DType.F32, StorageKind.STAGED)
    device.close()
    device.close()
    assert device.closed
    assert storage.closed
    for use in (lambda: device.manager, lambda: storage.tensor, lambda: storage.data):
        with pytest.raises(ClosedError, match="closed"):
            use()
    with pytest.raises(ClosedError, match="open a new Device"):
        device.allocate(64, DType.F32)
    storage.close()


def test_a_closed_storage_is_not_read(device: Device) -> None:
    storage = device.allocate(64, DType.F32, StorageKind.STAGED)
    storage.close()
    with pytest.raises(ClosedError, match="make a new one"):
        _ = storage.data
    with pytest.raises(ClosedError):
        storage.write(np.zeros(4, np.float32))


def test_device_memory_is_not_read_directly(device: Device) -> None:
    with pytest.raises(InvalidInputError, match="read_words"):
        _ = device.allocate(64, DType.F32, StorageKind.DEVICE).data


def test_more_than_fits_is_not_written(device: Device) -> None:
    storage = device.allocate(16, DType.F32, StorageKind.STAGED)
    storage.write(np.arange(4, dtype=np.float32))
    with pytest.raises(InvalidInputError, match="20 bytes do not fit a storage of 16"):
        storage.write(np.zeros(5, np.float32))
    with pytest.raises(InvalidInputError, match="whole words"):
        storage.write(np.zeros((2, 1), np.float16)[:1])
    np.testing.assert_array_equal(storage.data, np.arange(4))


def test_a_tensor_from_outside_has_no_location(fresh: Device) -> None:
    tensor = fresh.manager.tensor_t(np.arange(8, dtype=np.float32), fresh.kp.TensorTypes.device)
    storage = Storage.from_tensor(tensor, DType.F32)
    assert storage.location is None
    assert storage.nbytes == 32
    assert storage.kind is StorageKind.STAGED
    np.testing.assert_array_equal(storage.data, np.arange(8))
    assert fresh.allocated_bytes == 0


def test_the_subgroup_check_tells_right_from_wrong(fresh: Device) -> None:
    size = fresh.info.subgroup_size
    assert subgroup_check(fresh, size)
    assert not subgroup_check(fresh, 2 * size)
    assert not subgroup_check(fresh, size // 2)
    assert fresh.allocated_bytes == 0


def test_lanes_follow_the_device(device: Device) -> None:
    size = device.info.subgroup_size
    subgroup = choose_lanes(device, "subgroup")
    assert (subgroup.form, subgroup.tile, subgroup.workgroup) == ("subgroup", size, size)
    assert subgroup.block_rows == 4 * size
    shared = choose_lanes(device, "shared")
    assert shared.form == "shared"
    assert shared.workgroup % shared.tile == 0
    assert shared.workgroup <= device.info.limits.max_compute_work_group_invocations
    assert lanes_of(device) is lanes_of(device)
    assert lanes_of(device) == (subgroup if device.info.kind == "cpu" else shared)


def test_a_form_can_be_asked_for() -> None:
    with Device(cpu_ordinal(), lanes="shared") as device:
        assert lanes_of(device).form == "shared"
