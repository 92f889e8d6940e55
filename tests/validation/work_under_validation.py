"""Everything that records a sequence, run under the validation layer; started by the tests, with a `Work` as JSON.

The layer takes a binding for the whole of its buffer. So it sees every byte that is reused, but two dispatches that may
run at once and use different parts of one arena look to it as if they met; and where activations lie side by side, one
that is overrun looks well. `placement` says what lies together:

- `arena`: as it is for users. For models whose dispatches depend on one another one by one.
- `reuse`: activations that are alive at the same time lie in different buffers, and share one with those that come when
  they are dead. KV caches of layers and weights lie apart. All else, and the order above all, is as in the arena.
- `alone`: each activation and each of a step's data has a buffer of its own, of its size.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import vkdecode.decode.held_plans as held_plans
import vkdecode.gpu.device as device_module
import vkdecode.runtime.arena as arena_module
import vkdecode.runtime.executable as executable_module
from vkdecode.decode import DecodeMode, InferenceContext, KvCache
from vkdecode.doctor import examine
from vkdecode.gpu import (
    Algorithm,
    Barrier,
    Command,
    Device,
    Download,
    Recording,
    Run,
    Storage,
    StorageKind,
    Upload,
    lanes_of,
    read_words,
    registry,
)
from vkdecode.graph import FUSIONS, Graph, NodeId
from vkdecode.loading import load
from vkdecode.models import Model
from vkdecode.runtime import StorageCache, value_bytes
from vkdecode.runtime.arena import arena_place
from vkdecode.runtime.order import Span
from vkdecode.weights import DType

PATHS = (("device", "bounded"), ("device", "masked"), ("symenv", "masked"), ("symenv", "bounded"))
BOTH_OFFSETS = PATHS[:3:2]


@dataclass(frozen=True)
class Work:
    """What to do.

    Attributes:
        task: `run`, `controls` (each barrier left out in turn), `reach` (little work, for a layer that makes each
            kernel slow to compile), `too-far` (a kernel that reads one word past its buffer) or `doctor`.
        lanes: the kernels' form.
        folder: a tiny checkpoint's.
        placement: what lies together; see above.
        kv_dtype: element type of the caches.
        paths: KV offsets and arms.
        fused: whether dispatches are fused.
        buffer_bytes: how large a buffer may be, 0 for what the device says; smaller ones split weights.
        prompts: whether `reach` runs a chunk of a prompt too.

    """

    task: str
    lanes: str
    folder: str = ""
    placement: str = "arena"
    kv_dtype: str = "f32"
    paths: Sequence[Sequence[str]] = BOTH_OFFSETS
    fused: bool = True
    buffer_bytes: int = 0
    prompts: bool = False


def say(*words: object) -> None:
    """A line behind what the layer has written so far, which goes through a buffer of its own."""
    ctypes.CDLL(None).fflush(None)
    print(*words, flush=True)


def place(placement: str) -> None:
    """Let plans made from now on place their activations and constants like this."""
    if placement == "arena":
        return
    vars(device_module)["_MAX_BYTES_TOGETHER"] = 0
    if placement == "reuse":
        vars(arena_module)["_first_fit"] = first_free
    else:
        vars(arena_module)["_first_fit"] = lambda nbytes, _, arenas, __: Span(arena_place(arenas), 0, nbytes)
        vars(held_plans)["_allocate_data"] = allocate_apart


def first_free(nbytes: int, held: Collection[Span], arenas: int, max_bytes: int) -> Span:
    """In the place of `_first_fit`: an arena that holds nothing, the first there is, else another one."""
    taken = {span.place for span in held}
    free = (arena_place(number) for number in range(arenas) if arena_place(number) not in taken)
    return Span(next(free, arena_place(arenas)), 0, nbytes)


def allocate_apart(device: Device, graph: Graph, nodes: Sequence[NodeId], cache: StorageCache) -> None:
    """In the place of `_allocate_data`: a storage for each."""
    for node in nodes:
        cache[node] = device.allocate(value_bytes(graph, node), DType.U32, StorageKind.STAGED)


@contextmanager
def opened(work: Work) -> Iterator[tuple[Model, InferenceContext, Callable[[int], KvCache]]]:
    """The model, a context, and what makes caches."""
    with ExitStack() as stack:
        device = stack.enter_context(Device(0, lanes=work.lanes))
        if work.buffer_bytes:
            limits = replace(device.info.limits, max_storage_buffer_range_bytes=work.buffer_bytes)
            device.info = replace(device.info, limits=limits)
        model = stack.enter_context(load(Path(work.folder), device=device))
        context = stack.enter_context(InferenceContext(device, fusions=FUSIONS if work.fused else ()))
        yield model, context, lambda rows: stack.enter_context(closing(model.new_kv_cache(rows, work.kv_dtype)))


def tokens_of(folder: str, count: int) -> list[int]:
    """The reference's prompt, again and again."""
    with np.load(Path(folder) / "expected.npz") as arrays:
        return [int(one) for one in np.resize(arrays["input_ids"], count)]


def run_all(work: Work) -> None:
    """Each path on each rung; the held one with the plans of the captured one."""
    ids = tokens_of(work.folder, 80)
    with opened(work) as (model, context, new_cache):
        for path in work.paths:
            for rung in ("captured", "held"):
                steps(model, ids, new_cache(96), context, DecodeMode(rung, *path))
                say("ran", lanes_of(model.device).form, *path, rung)
            # What is built anew is recorded as a held plan is, so a step of each kind does.
            kv, mode = new_cache(32), DecodeMode("rebuild", *path)
            run(model, ids[:7], kv, context, mode)
            model.top_candidates(ids[:1], kv, context, 40, mode)
            run(model, ids[1:2], kv, context, mode)
            say("ran", lanes_of(model.device).form, *path, "rebuild")


def steps(model: Model, ids: list[int], kv: KvCache, context: InferenceContext, mode: DecodeMode) -> None:
    """Prompts, single tokens and lists of the highest logits, a re-bind, and reading a cache back."""
    run(model, ids[:70], kv, context, mode)  # on the SymEnv path, a full chunk without logits and another one
    kv.truncate_to(24)
    run(model, ids[:17], kv, context, mode, "all")
    for token in ids[:3]:
        model.top_candidates([token], kv, context, 40, mode)
    model.top_candidates(ids[:7], kv, context, 40, mode)
    model.top_candidates(ids[3:4], kv, context, 1, mode)
    for token in ids[:2]:
        run(model, [token], kv, context, mode)
    kv.clear()
    run(model, ids[:2], kv, context, mode)
    run(model, ids[2:3], kv, context, mode)
    read_words(model.device, kv.layers[0].k)


def reach(work: Work) -> None:
    """Perhaps a prompt's chunk that is not full; decoding, both lists, a re-bind, and reading a cache back."""
    ids = tokens_of(work.folder, 13)
    with opened(work) as (model, context, new_cache):
        for path in work.paths:
            kv, mode = new_cache(21), DecodeMode("captured", *path)
            if work.prompts:
                run(model, ids, kv, context, mode)
            for token in ids[:3]:
                run(model, [token], kv, context, mode)
            for count in (1, 40):
                model.top_candidates(ids[:1], kv, context, count, mode)
            kv.clear()
            run(model, ids[:1], kv, context, mode)
            assert context.stats.rebinds >= 1
            read_words(model.device, kv.layers[0].k)
            say("ran", lanes_of(model.device).form, *path, "captured")


def controls(work: Work) -> None:
    """Record a prompt's chunk and a decode step on each path without one of their barriers, for each of them."""
    ids = tokens_of(work.folder, 13)
    with opened(work) as (model, context, new_cache):
        for path in work.paths:
            kv, mode = new_cache(32), DecodeMode("held", *path)
            for part in (ids, ids[:1]):
                with commands_recorded() as made:
                    run(model, part, kv, context, mode)
                (commands,) = [one for one in made if any(isinstance(command, Barrier) for command in one)]
                left_out_one_by_one(model.device, commands)
            session = context.take_decode_session()
            assert session is not None
            if work.placement != "arena":
                overwritten(model.device, commands, session.executable.arenas)
            context.put_decode_session(session)
    say("ran the controls")


@contextmanager
def commands_recorded() -> Iterator[list[Sequence[Command]]]:
    """The commands of each recording that plans make meanwhile."""
    made: list[Sequence[Command]] = []

    class Noted(Recording):
        def __init__(self, device: Device, commands: Sequence[Command]) -> None:
            made.append(commands)
            super().__init__(device, commands)

    vars(executable_module)["Recording"] = Noted
    try:
        yield made
    finally:
        vars(executable_module)["Recording"] = Recording


def left_out_one_by_one(device: Device, commands: Sequence[Command]) -> None:
    """Record all of it but one barrier, for each of them, and last but the barrier behind the upload."""
    kernels = [one.algorithm.kernel.key.split()[0] if isinstance(one, Run) else "" for one in commands]
    say("left out: nothing")
    Recording(device, commands).submit()
    for at, command in enumerate(commands):
        if isinstance(command, Barrier):
            say("left out: the barrier before", kernels[at + 1])
            Recording(device, [*commands[:at], *commands[at + 1 :]]).submit()
    say("left out: the barrier behind the upload")
    CopiedOnly(device, commands).submit()


class CopiedOnly(Recording):
    """A recording that copies what it uploads, and does not wait for it."""

    def _operations(self, command: Command) -> list[Any]:
        return super()._operations(command)[: 1 if isinstance(command, Upload) else None]


def overwritten(device: Device, commands: Sequence[Command], arenas: Collection[Storage]) -> None:
    """Run two dispatches of which the second one only overwrites what the first one reads, in the arenas' memory."""
    runs = [one for one in commands if isinstance(one, Run)]
    first, second = next(
        (one, other)
        for at, one in enumerate(runs)
        for other in runs[at + 1 :]
        if bound(one, "read") & bound(other, "write") & set(arenas)
        and not bound(one, "write") & (bound(other, "read") | bound(other, "write"))
    )
    say("left out: a barrier before what overwrites")
    Recording(device, [first, second]).submit()
    say("left out: nothing")
    Recording(device, [first, Barrier(tuple(bound(first, "read"))), second]).submit()


def bound(command: Run, access: str) -> set[Storage]:
    """What a dispatch reads or writes."""
    algorithm = command.algorithm
    pairs = zip(algorithm.storages, algorithm.kernel.bindings, strict=True)
    return {storage for storage, binding in pairs if access in binding.access}


def too_far() -> None:
    """Copy 17 words out of a buffer of 16; to write past one could spoil the layer's own memory, and its report."""
    with Device(0) as device:
        source, target = (device.allocate(nbytes, DType.U32, StorageKind.STAGED) for nbytes in (64, 128))
        copy = Algorithm(device, registry().get("copy_words"), [source, target], {"WORKGROUP": 64}, (1, 1, 1))
        push = {"source_start": 0, "target_start": 0, "count": 17}
        Recording(device, [Run(copy, push), Download((target,))]).submit()


def doctor(work: Work) -> None:
    """All that `vkdecode doctor` does on a device."""
    with Device(0, lanes=work.lanes) as device:
        faults = examine(device).faults
    say(*(f"fault: {fault}" for fault in faults), "ran the doctor")


def run(
    model: Model, token_ids: list[int], kv: KvCache, context: InferenceContext, mode: DecodeMode, logits: str = "last"
) -> None:
    model.forward_with_kv_context_persistent(token_ids, kv, context, mode, logits)


TASKS: dict[str, Callable[[Work], None]] = {
    "run": run_all,
    "reach": reach,
    "controls": controls,
    "too-far": lambda _: too_far(),
    "doctor": doctor,
}

if __name__ == "__main__":
    asked = Work(**json.loads(sys.argv[1]))
    place(asked.placement)
    TASKS[asked.task](asked)
    say("done")
