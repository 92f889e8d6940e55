"""The weights of one model on one device: read from the file in pieces, packed, uploaded, and held once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from vkdecode.errors import ClosedError, OutOfDeviceMemoryError
from vkdecode.gpu import Device, Lanes, Storage, StorageKind, Uploader, storage_bytes
from vkdecode.graph import RowPick, WeightSpec
from vkdecode.runtime.weight_layout import device_rows, pack_rows, packed_bytes, picked_rows, weight_bytes
from vkdecode.weights import DType, WeightSource
from vkdecode.weights.recode import recode_rows

Progress = Callable[[int, int], None]
_PIECE_BYTES = 8 << 20


class WeightStore:
    """Uploads weight constants on first use and serves the same storage from then on.

    Weights of one shape lie together in a buffer, layer after layer: plans bind it once for all of them.

    Args:
        device: where the weights live.
        lanes: the kernel shape, which decides their layout.
        open_source: opens the model file; it is open only while something is read.

    """

    def __init__(self, device: Device, lanes: Lanes, open_source: Callable[[], WeightSource]) -> None:
        self.device = device
        self.lanes = lanes
        self._open_source = open_source
        self._storages: dict[WeightSpec, Storage] = {}
        self._closed = False

    def load(
        self, specs: Iterable[WeightSpec], progress: Progress | None = None, opened: WeightSource | None = None
    ) -> None:
        """Upload all of these; `progress` is called with bytes done and bytes in all.

        `opened` is the model file where it is open already; it stays so.

        Raises:
            VkDecodeError: a tensor is missing or mis-shaped, or memory runs out; what was taken here is given back.

        """
        wanted = [spec for spec in dict.fromkeys(specs) if spec not in self._storages]
        total = sum(self.nbytes(spec) for spec in wanted)
        self._check_fits(total)
        done = 0
        source = opened or self._open_source()
        uploader = Uploader(self.device)
        # A CPU driver's memory is the host's: there is nothing to copy it to.
        memory = StorageKind.HOST if self.device.info.kind == "cpu" else StorageKind.DEVICE
        made: list[Storage] = []
        loaded: dict[WeightSpec, Storage] = {}
        try:
            for group in self._groups(wanted):
                made += self.device.allocate_parts(len(group), self.nbytes(group[0]), *self._kind(group[0]), memory)
                loaded |= zip(group, made[-len(group) :], strict=True)
            for spec in wanted:
                self._fill(loaded[spec], spec, source, uploader)
                done += self.nbytes(spec)
                if progress is not None:
                    progress(done, total)
        except BaseException:
            for storage in made:
                storage.whole.close()
            raise
        finally:
            uploader.close()
            if opened is None:
                source.close()
        self._storages |= loaded

    def get(self, spec: WeightSpec) -> Storage:
        """The storage of a constant, uploaded now if it has not been.

        Raises:
            ClosedError: the model was closed.
            VkDecodeError: like `load`.

        """
        if self._closed:
            raise ClosedError("the model was closed; load it again")
        if spec not in self._storages:
            self.load([spec])
        return self._storages[spec]

    def nbytes(self, spec: WeightSpec) -> int:
        """Bytes that a constant takes on the device."""
        return weight_bytes(spec, self.lanes.tile, self.lanes.block_rows)

    def close(self) -> None:
        """Let go of all weights; a plan that holds one keeps it alive until it is dropped."""
        self._storages.clear()
        self._closed = True

    def _check_fits(self, total: int) -> None:
        device = self.device
        if total > device.free_bytes:
            raise OutOfDeviceMemoryError(
                f"the weights take {total} bytes, device {device.info} has {device.free_bytes} free; "
                "use a smaller model or one stored at fewer bits"
            )

    def _kind(self, spec: WeightSpec) -> tuple[DType, str]:
        encoding = "plain" if spec.vector else f"tiles{self.lanes.tile}"
        return DType.F32 if spec.vector else spec.dtype, encoding

    def _groups(self, specs: Iterable[WeightSpec]) -> list[list[WeightSpec]]:
        """Weights that lie together: of one kind and size."""
        groups: dict[tuple[object, ...], list[WeightSpec]] = {}
        for spec in specs:
            groups.setdefault((*self._kind(spec), spec.columns, storage_bytes(self.nbytes(spec))), []).append(spec)
        return list(groups.values())

    def _fill(self, storage: Storage, spec: WeightSpec, source: WeightSource, uploader: Uploader) -> None:
        slots = device_rows(spec, self.lanes.tile, self.lanes.block_rows)
        if spec.vector:
            values = _gather(source, spec, slots).reshape(-1)
            uploader.write(storage, 0, values.astype(np.float32) + 1 if spec.plus_one else values)
            return
        row_bytes = packed_bytes(spec, 1)
        block = self.lanes.block_rows
        step = max(_PIECE_BYTES // (row_bytes * block), 1) * block
        if spec.transposed:
            step = slots.size // (spec.experts or 1)  # each piece would read the whole matrix
        for first in range(0, slots.size, step):
            rows = _gather(source, spec, slots[first : first + step])
            uploader.write(storage, first * row_bytes, pack_rows(rows, spec.dtype, self.lanes.tile))


def _gather(source: WeightSource, spec: WeightSpec, slots: NDArray[np.int64]) -> NDArray[np.generic]:
    """The stacked rows that the slots name, [slots, columns] of the spec's dtype; padding rows are zero.

    Rows of a block format are raw bytes, [slots, bytes]; a block of zero bytes stands for zeros in each of them.
    """
    dtype = DType.F32 if spec.vector else spec.dtype
    out = np.zeros((slots.size, spec.columns // dtype.block_columns * dtype.block_bytes // dtype.itemsize), dtype.numpy)
    start = 0
    picks = spec.picks or (RowPick(),) * len(spec.names)
    for name, count, pick in zip(spec.names, spec.part_rows, picks, strict=True):
        here = np.flatnonzero((slots >= start) & (slots < start + count))
        if name is not None and here.size:
            rows = picked_rows(pick, slots[here] - start)
            values = _read(source, name, rows, spec)
            out[here] = recode_rows(values.reshape(rows.size, -1), source.info(name).dtype, dtype, name)
        start += count
    return out


def _read(source: WeightSource, name: str, rows: NDArray[np.int64], spec: WeightSpec) -> NDArray[np.generic]:
    """These rows of a tensor, columns of one that is stored transposed, or values of a vector that is not flat."""
    if spec.transposed and len(source.info(name).shape) > 2:
        return _read_stack(source, name, rows)
    if spec.transposed:
        return np.ascontiguousarray(source.read(name).T[rows])
    if spec.vector and len(source.info(name).shape) > 1:
        return np.ascontiguousarray(source.read(name).reshape(-1)[rows])
    consecutive = rows[-1] - rows[0] + 1 == rows.size and bool((np.diff(rows) == 1).all())
    return source.read(name, slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else rows)


def _read_stack(source: WeightSource, name: str, rows: NDArray[np.int64]) -> NDArray[np.generic]:
    """These rows of matrices that a tensor [experts, columns, rows] stacks, no more than one of them in memory."""
    _, columns, height = source.info(name).shape
    experts, columns_of = np.divmod(rows, height)
    out = np.empty((rows.size, columns), source.info(name).dtype.numpy)
    for expert in np.unique(experts).tolist():
        here = experts == expert
        out[here] = source.read(name, slice(expert, expert + 1))[0].T[columns_of[here]]
    return out
