"""Everything that records a sequence, run once for a kernel form; started by the test under the validation layer.

Arguments: the kernel form, a tiny checkpoint's folder, and what to do: `whole`, the number of the ordering step to
leave out of each decode recording, `reach` or `reach-decode` (little work, for a layer that makes each kernel slow to
compile), `doctor`, or `too-far` (a kernel that reads one word past its buffer). Prints what it ran.
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
from vkdecode.runtime import InferenceContext
from vkdecode.weights import DType

PATHS = (("device", "bounded"), ("device", "masked"), ("symenv", "masked"), ("symenv", "bounded"))


def leave_out(number: int) -> None:
    """Make every recording of a plan without its sync of this number."""

    class Incomplete(Recording):
        def __init__(self, device: Device, steps: Sequence[Step]) -> None:
            syncs = [at for at, step in enumerate(steps) if isinstance(step, Sync)]
            super().__init__(device, [step for at, step in enumerate(steps) if at != syncs[number]])

    vars(executable_module)["Recording"] = Incomplete


def work(lanes: str, folder: Path, only_decode: bool) -> None:
    with np.load(folder / "expected.npz") as arrays:
        prompt, decode = arrays["input_ids"].tolist(), arrays["decode_ids"].tolist()
    with Device(0, lanes=lanes) as device, load(folder, device=device) as model:
        for kv_offset, arm in PATHS[:1] if only_decode else PATHS:
            for rung in ("captured",) if only_decode else ("captured", "held", "rebuild"):
                mode = DecodeMode(rung, kv_offset, arm)
                with InferenceContext(device) as context, closing(model.new_kv_cache(64)) as kv:
                    if not only_decode:
                        run(model, prompt, kv, context, mode)
                        run(model, prompt[:17], kv, context, mode, "all")
                    for token in decode[:3]:
                        model.top_candidates([token], kv, context, 40, mode)
                    if not only_decode:
                        model.top_candidates(prompt[:7], kv, context, 40, mode)
                        model.top_candidates(decode[3:4], kv, context, 1, mode)
                        for token in decode[:2]:
                            run(model, [token], kv, context, mode)
                        kv.clear()
                        run(model, prompt[:2], kv, context, mode)
                        run(model, prompt[2:3], kv, context, mode)
                        read_words(device, kv.layers[0].k)
                print(f"ran {device.lanes.form} {kv_offset} {arm} {rung}")
        if not only_decode:
            with InferenceContext(device, fusions=()) as context, closing(model.new_kv_cache(64, "f16")) as kv:
                run(model, prompt, kv, context, DecodeMode())
                run(model, decode[:1], kv, context, DecodeMode())
            print("ran without fusions")


def reach(lanes: str, folder: Path, prompts: bool) -> None:
    """A prompt chunk that is not full, decoding on both KV-offset paths, a re-bind, and reading a cache back."""
    with np.load(folder / "expected.npz") as arrays:
        prompt = arrays["input_ids"].tolist()
    with Device(0, lanes=lanes) as device, load(folder, device=device) as model:
        for kv_offset, arm in PATHS[:3:2]:
            mode = DecodeMode("captured", kv_offset, arm)
            with InferenceContext(device) as context, closing(model.new_kv_cache(21)) as kv:
                if prompts and kv_offset == "device":
                    run(model, prompt[:13], kv, context, mode)
                for token in prompt[:3]:
                    run(model, [token], kv, context, mode)
                for count in (1, 40):
                    model.top_candidates(prompt[:1], kv, context, count, mode)
                kv.clear()
                run(model, prompt[:1], kv, context, mode)
                assert context.stats.rebinds >= 1
                read_words(device, kv.layers[0].k)
            print(f"ran {device.lanes.form} {kv_offset} {arm} captured")


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
        reach(form, Path(where), prompts=what == "reach")
    else:
        if what != "whole":
            leave_out(int(what))
        work(form, Path(where), only_decode=what != "whole")
    print("done")
