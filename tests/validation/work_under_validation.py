"""Everything that records a sequence, run once for a kernel form; started by the test under the validation layer.

Arguments: the kernel form, a tiny checkpoint's folder, and what to do: `whole`, `both-offsets` (on one path of each KV
offset instead of all), the number of the ordering step to leave out of each decode recording, `doctor`, `too-far` (a
kernel that reads one word past its buffer), or `reach-` with a KV offset, an arm and, where prompts are run too,
`-prompt` (little work, for a layer that makes each kernel slow to compile). Prints what it ran.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

import vkdecode.runtime.executable as executable_module
from vkdecode.decode import DecodeMode, KvCache
from vkdecode.doctor import examine
from vkdecode.gpu import Algorithm, Device, Recording, Run, Step, StorageKind, Sync, read_words, registry
from vkdecode.loading import load
from vkdecode.models import Model
from vkdecode.decode import InferenceContext
from vkdecode.weights import DType

PATHS = (("device", "bounded"), ("device", "masked"), ("symenv", "masked"), ("symenv", "bounded"))
WHOLE = {"whole": PATHS, "both-offsets": PATHS[:3:2]}


def leave_out(number: int) -> None:
    """Make every recording of a plan without its sync of this number."""

    class Incomplete(Recording):
        def __init__(self, device: Device, steps: Sequence[Step]) -> None:
            syncs = [at for at, step in enumerate(steps) if isinstance(step, Sync)]
            super().__init__(device, [step for at, step in enumerate(steps) if at != syncs[number]])

    vars(executable_module)["Recording"] = Incomplete


def work(lanes: str, folder: Path, paths: Sequence[tuple[str, str]]) -> None:
    """Everything on each of the paths, the held rung with the plans of the captured one, and once without fusions."""
    prompt, decode = tokens_of(folder)
    with Device(0, lanes=lanes) as device, load(folder, device=device) as model:
        for path in paths:
            with InferenceContext(device) as context:
                for rung in ("captured", "held"):
                    with closing(model.new_kv_cache(64)) as kv:
                        steps(model, prompt, decode, kv, context, DecodeMode(rung, *path))
                    print("ran", device.lanes.form, *path, rung)
            # What is built anew is recorded as a held plan is, so a step of each kind does.
            mode = DecodeMode("rebuild", *path)
            with InferenceContext(device) as context, closing(model.new_kv_cache(64)) as kv:
                run(model, prompt[:7], kv, context, mode)
                model.top_candidates(decode[:1], kv, context, 40, mode)
                run(model, decode[1:2], kv, context, mode)
            print("ran", device.lanes.form, *path, "rebuild")
        with InferenceContext(device, fusions=()) as context, closing(model.new_kv_cache(64, "f16")) as kv:
            run(model, prompt, kv, context, DecodeMode())
            run(model, decode[:1], kv, context, DecodeMode())
        print("ran without fusions")


def steps(
    model: Model, prompt: list[int], decode: list[int], kv: KvCache, context: InferenceContext, mode: DecodeMode
) -> None:
    """Prompts, single tokens and candidates, a re-bind, and reading a cache back."""
    run(model, prompt, kv, context, mode)
    run(model, prompt[:17], kv, context, mode, "all")
    for token in decode[:3]:
        model.top_candidates([token], kv, context, 40, mode)
    model.top_candidates(prompt[:7], kv, context, 40, mode)
    model.top_candidates(decode[3:4], kv, context, 1, mode)
    for token in decode[:2]:
        run(model, [token], kv, context, mode)
    kv.clear()
    run(model, prompt[:2], kv, context, mode)
    run(model, prompt[2:3], kv, context, mode)
    read_words(model.device, kv.layers[0].k)


def decode_only(lanes: str, folder: Path) -> None:
    """Candidates of three tokens through one recording."""
    _, decode = tokens_of(folder)
    with (
        Device(0, lanes=lanes) as device,
        load(folder, device=device) as model,
        InferenceContext(device) as context,
        closing(model.new_kv_cache(64)) as kv,
    ):
        for token in decode[:3]:
            model.top_candidates([token], kv, context, 40, DecodeMode("captured", *PATHS[0]))
    print("ran", lanes, *PATHS[0], "captured")


def tokens_of(folder: Path) -> tuple[list[int], list[int]]:
    """The reference's prompt, and the tokens after it."""
    with np.load(folder / "expected.npz") as arrays:
        return arrays["input_ids"].tolist(), arrays["decode_ids"].tolist()


def reach(lanes: str, folder: Path, path: tuple[str, str], prompts: bool) -> None:
    """Decoding, candidates, a re-bind and reading a cache back, and before it a prompt chunk that is not full."""
    prompt, _ = tokens_of(folder)
    mode = DecodeMode("captured", *path)
    with (
        Device(0, lanes=lanes) as device,
        load(folder, device=device) as model,
        InferenceContext(device) as context,
        closing(model.new_kv_cache(21)) as kv,
    ):
        if prompts:
            run(model, prompt[:13], kv, context, mode)
        for token in prompt[:3]:
            run(model, [token], kv, context, mode)
        for count in (1, 40):
            model.top_candidates(prompt[:1], kv, context, count, mode)
        kv.clear()
        run(model, prompt[:1], kv, context, mode)
        assert context.stats.rebinds >= 1
        read_words(device, kv.layers[0].k)
    print("ran", lanes, *path, "captured")


def too_far() -> None:
    """Copy 17 words out of a buffer of 16; to write past one could spoil the layer's own memory, and its report."""
    with Device(0) as device:
        source, target = (device.allocate(nbytes, DType.U32, StorageKind.STAGED) for nbytes in (64, 128))
        copy = Algorithm(device, registry().get("copy_words"), [source, target], {"WORKGROUP": 64}, (1, 1, 1))
        push = {"source_start": 0, "target_start": 0, "count": 17}
        Recording(device, [Run(copy, push), Sync((target,))]).submit()


def run(
    model: Model, token_ids: list[int], kv: KvCache, context: InferenceContext, mode: DecodeMode, logits: str = "last"
) -> None:
    model.forward_with_kv_context_persistent(token_ids, kv, context, mode, logits)


if __name__ == "__main__":
    form, where, what = sys.argv[1:]
    if what == "too-far":
        too_far()
    elif what == "doctor":
        with Device(0, lanes=form) as device:
            faults = examine(device).faults
            print(*(f"fault: {fault}" for fault in faults), "ran the doctor", sep="\n")
    elif what.startswith("reach"):
        _, kv_offset, arm = what.split("-")[:3]
        reach(form, Path(where), (kv_offset, arm), prompts=what.endswith("-prompt"))
    elif what in WHOLE:
        work(form, Path(where), WHOLE[what])
    else:
        leave_out(int(what))
        decode_only(form, Path(where))
    print("done")
