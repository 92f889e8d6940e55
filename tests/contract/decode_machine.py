"""A state machine over models, caches, contexts and plans, judged by the rebuild rung and the reference contract."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kv_copies import replace_layer
from reference_contract import Allocations, CacheModel, ContextModel, Path, PlanModel
from stepping import taken
from tiny_llama import PATHS, TINY

from vkdecode.decode import DecodeMode, DecodeSession, InferenceContext, KvCache
from vkdecode.errors import ContextLengthError, InvalidInputError
from vkdecode.gpu import Device
from vkdecode.loading import load
from vkdecode.models import Model

# The same weights twice, other weights at equal geometry, another geometry, and another architecture.
CHECKPOINTS = ("llama", "llama", "llama-rope-linear", "llama-tied-mqa", "phi")
SHAPES = ((24, "f32"), (40, "f32"), (24, "f16"))
RUNGS = ("captured", "captured", "held", "rebuild")
TOKENS = (1, 1, 1, 1, 2, 3, 16, 20)


@dataclass(frozen=True)
class LoadedModel:
    """A model and its numbers in the reference."""

    number: int
    device: int
    checkpoint: str
    model: Model

    @property
    def geometry(self) -> object:
        return self.model.kv_geometry(1, "f32")


@dataclass
class World:
    """Devices and the models on them, loaded once; and how often each thing happened in all runs together."""

    devices: Sequence[Device]
    models: list[LoadedModel] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)

    def load(self, folder: FilePath = TINY) -> None:
        """All checkpoints on the first device, and the first one on the others too."""
        places = [(0, name) for name in CHECKPOINTS] + [(at, CHECKPOINTS[0]) for at in range(1, len(self.devices))]
        for number, (at, name) in enumerate(places):
            self.models.append(LoadedModel(number, at, name, load(folder / name, device=self.devices[at])))

    def close(self) -> None:
        for one in self.models:
            one.model.close()


@dataclass(eq=False)
class CacheUnderTest:
    """A cache, its twin that only the rebuild rung runs on, and its reference."""

    kv: KvCache
    twin: KvCache
    geometry: object
    ref: CacheModel


@dataclass(frozen=True)
class StepChoice:
    """One step: everything but the token ids."""

    context: int
    model: LoadedModel
    cache: CacheUnderTest
    tokens: int
    path: Path
    rung: str


class DecodeMachine(RuleBasedStateMachine):
    """Random interleavings; `world` is set by `run_machine`."""

    world: World
    caches = Bundle("caches")

    def __init__(self) -> None:
        super().__init__()
        devices = self.world.devices
        homes = [0, 0, *range(1, len(devices))]
        self.contexts = [InferenceContext(devices[at]) for at in homes]
        self.refs = [ContextModel(at) for at in homes]
        self.oracles = [InferenceContext(one) for one in devices]
        self.allocations = Allocations()
        self.alloc_ids: dict[int, int] = {}
        self.open: list[CacheUnderTest] = []
        self.taken: list[tuple[DecodeSession, PlanModel]] = []
        self.last: StepChoice | None = None

    def _new_cache(self, model: LoadedModel, shape: tuple[int, str]) -> CacheUnderTest:
        kv, twin = (model.model.new_kv_cache(*shape) for _ in range(2))
        made = CacheUnderTest(kv, twin, model.geometry, CacheModel(model.device, shape, self.allocations.new()))
        self.open.append(made)
        return made

    @initialize(target=caches)
    def first_caches(self) -> Any:
        return multiple(*(self._new_cache(self.world.models[0], SHAPES[0]) for _ in range(2)))

    @rule(target=caches, model=st.integers(0, 9), shape=st.sampled_from(SHAPES))
    def new_cache(self, model: int, shape: tuple[int, str]) -> CacheUnderTest:
        return self._new_cache(self.world.models[model % len(self.world.models)], shape)

    @precondition(lambda self: len(self.open) > 1)
    @rule(cache=consumes(caches))
    def close_cache(self, cache: CacheUnderTest) -> None:
        cache.kv.close()
        cache.twin.close()
        self.open.remove(cache)

    @rule(
        context=st.integers(0, 9),
        model=st.integers(0, 9),
        cache=caches,
        tokens=st.sampled_from(TOKENS),
        path=st.sampled_from(PATHS),
        rung=st.sampled_from(RUNGS),
        first=st.integers(0, 159),
    )
    def step(
        self, context: int, model: int, cache: CacheUnderTest, tokens: int, path: Path, rung: str, first: int
    ) -> None:
        fitting = [one for one in self.world.models if one.geometry == cache.geometry]
        choice = fitting[model % len(fitting)]
        # Most steps are on one device; some are not, to be refused.
        homes = [at for at, ref in enumerate(self.refs) if context == 9 or ref.device == cache.ref.device]
        if context < 9:
            here = [one for one in fitting if one.device == cache.ref.device]
            choice = here[model % len(here)]
        self._step(StepChoice(homes[context % len(homes)], choice, cache, tokens, path, rung), first)

    @precondition(lambda self: self._can_repeat())
    @rule(first=st.integers(0, 159), rung=st.sampled_from(RUNGS[:3]))
    def same_step_again(self, first: int, rung: str) -> None:
        last = self._last()
        self._step(StepChoice(last.context, last.model, last.cache, last.tokens, last.path, rung), first)

    @precondition(lambda self: self._can_repeat())
    @rule(first=st.integers(0, 159), cache=caches)
    def same_step_on_another_cache(self, first: int, cache: CacheUnderTest) -> None:
        last = self._last()
        if cache.geometry == last.cache.geometry:
            self._step(StepChoice(last.context, last.model, cache, last.tokens, last.path, "captured"), first)

    @precondition(lambda self: self._can_repeat())
    @rule(first=st.integers(0, 159), model=st.integers(0, 9))
    def same_step_of_another_model(self, first: int, model: int) -> None:
        last = self._last()
        self.step(last.context, model, last.cache, last.tokens, last.path, "captured", first)

    @rule(cache=caches, kept=st.floats(0, 1))
    def truncate(self, cache: CacheUnderTest, kept: float) -> None:
        length = int(cache.kv.cached_len * kept)
        cache.kv.truncate_to(length)
        cache.twin.truncate_to(length)

    @rule(cache=caches)
    def clear(self, cache: CacheUnderTest) -> None:
        cache.kv.clear()
        cache.twin.clear()
        cache.ref.alloc = self.allocations.new()

    @rule(cache=caches, layer=st.integers(0, 1), outside=st.sampled_from((False, False, True)))
    def set_layer(self, cache: CacheUnderTest, layer: int, outside: bool) -> None:
        replace_layer(self.world.devices[cache.ref.device], cache.kv, layer, outside)
        cache.ref.alloc = self.allocations.new()
        (cache.ref.outside.add if outside else cache.ref.outside.discard)(layer)

    @precondition(lambda self: any(ref.decode is not None for ref in self.refs))
    @rule(context=st.integers(0, 9))
    def take(self, context: int) -> None:
        holding = [at for at, ref in enumerate(self.refs) if ref.decode is not None]
        at = holding[context % len(holding)]
        plan, self.refs[at].decode = self.refs[at].decode, None
        assert plan is not None
        self.taken.append((taken(self.contexts[at]), plan))

    @precondition(lambda self: self.taken)
    @rule(context=st.integers(0, 9), which=st.integers(0, 9))
    def put(self, context: int, which: int) -> None:
        session, plan = self.taken.pop(which % len(self.taken))
        homes = [at for at, ref in enumerate(self.refs) if ref.device == plan.device]
        at = homes[context % len(homes)]
        self.contexts[at].put_decode_session(session)
        self.refs[at].decode = plan

    @precondition(lambda self: self.taken)
    @rule(which=st.integers(0, 9), at=st.integers(0, 9), model=st.sampled_from((None, None, None, 0, 2, 3)))
    def rebind_taken(self, which: int, at: int, model: int | None) -> None:
        session, plan = self.taken[which % len(self.taken)]
        asked = self.world.models[plan.model if model is None else model]
        fitting = [one for one in self.open if one.geometry == asked.geometry]
        # Mostly a cache of the plan's own shape, since another one makes it stale.
        alike = [one for one in fitting if one.ref.shape == plan.shape]
        if not fitting:
            return
        choices = alike if alike and at < 9 else fitting
        cache = choices[at % len(choices)]
        expected = plan.validity(asked.number, 1, cache.ref)
        question = (1, cache.kv.max_seq_len, len(cache.kv.layers), cache.kv.dtype, asked.model.shape_key)
        assert session.validity_for(*question, cache.kv.alloc_id).name == expected
        assert session.is_valid_for(*question, cache.kv.alloc_id) == (expected == "VALID")
        self.world.totals[f"direct {expected}"] += 1
        if expected == "ALLOCATION_CHANGED":
            answer = session.rebind_kv(cache.kv)
            kind = None if answer is None else answer.kind
            assert kind == plan.rebind(cache.ref)
            self.world.totals[f"direct {kind}"] += 1
            if answer is None:
                session.capture = None

    @invariant()
    def counters_are_as_predicted(self) -> None:
        for context, ref in zip(self.contexts, self.refs, strict=True):
            assert asdict(context.stats) == ref.counts
            assert context.has_decode_session == (ref.decode is not None)

    @invariant()
    def allocation_ids_name_allocations(self) -> None:
        for cache in self.open:
            assert self.alloc_ids.setdefault(cache.ref.alloc, cache.kv.alloc_id) == cache.kv.alloc_id
            assert cache.kv.cached_len == cache.twin.cached_len
        assert len(set(self.alloc_ids.values())) == len(self.alloc_ids)

    def teardown(self) -> None:
        for ref in self.refs:
            self.world.totals.update({name: count for name, count in ref.counts.items() if count})
        for context in [*self.contexts, *self.oracles]:
            context.close()
        for session, _ in self.taken:
            session.close()
        for cache in self.open:
            cache.kv.close()
            cache.twin.close()

    def _last(self) -> StepChoice:
        assert self.last is not None
        return self.last

    def _can_repeat(self) -> bool:
        return self.last is not None and self.last.cache in self.open

    def _step(self, choice: StepChoice, first: int) -> None:
        model, cache, ref = choice.model.model, choice.cache, self.refs[choice.context]
        ids = [(first + 7 * at) % model.vocab_size for at in range(choice.tokens)]
        mode = DecodeMode(choice.rung, *choice.path)
        context = self.contexts[choice.context]
        if not ref.device == choice.model.device == cache.ref.device:
            self._is_refused(InvalidInputError, model, ids, cache.kv, context, mode)
            return
        if cache.kv.cached_len + choice.tokens > cache.kv.max_seq_len:
            self._is_refused(ContextLengthError, model, ids, cache.kv, context, mode)
            self.truncate(cache, 0.0)
        logits = model.forward_with_kv_context_persistent(ids, cache.kv, context, mode)
        ref.step(choice.model.number, cache.ref, choice.tokens, choice.path, choice.rung)
        oracle = self.oracles[choice.model.device]
        anew = model.forward_with_kv_context_persistent(ids, cache.twin, oracle, DecodeMode("rebuild", *choice.path))
        assert np.isfinite(anew).all()
        np.testing.assert_array_equal(logits, anew)
        self.last = choice

    def _is_refused(
        self,
        error: type[Exception],
        model: Model,
        ids: Sequence[int],
        kv: KvCache,
        context: InferenceContext,
        mode: DecodeMode,
    ) -> None:
        """A step that must raise and leave everything as it is."""
        self.world.totals[error.__name__] += 1
        with pytest.raises(error):
            model.forward_with_kv_context_persistent(ids, kv, context, mode)


def _machine(world: World) -> Any:
    return type("DecodeMachineRun", (DecodeMachine,), {"world": world})


def run_scripted(world: World, path: Path) -> None:
    """One walk by hand on which everything happens that is counted, so that the random ones need not be lucky."""
    machine: DecodeMachine = _machine(world)()

    def check() -> None:
        machine.counters_are_as_predicted()
        machine.allocation_ids_name_allocations()

    first, second = machine.first_caches().values
    for cache, rungs in ((first, RUNGS[1:]), (second, RUNGS[1:]), (first, RUNGS[:1])):
        for rung, tokens in itertools.product(rungs, (3, 1)):
            machine.step(0, 0, cache, tokens, path, rung, 3)
            check()
    changes: tuple[Callable[[], object], ...] = (
        lambda: machine.truncate(first, 0.5),
        lambda: machine.clear(first),
        lambda: machine.step(0, 0, first, 3, path, "captured", 5),
        lambda: machine.set_layer(first, 1, False),
        lambda: machine.set_layer(first, 0, True),
        lambda: machine.set_layer(first, 0, False),
        lambda: machine.same_step_of_another_model(11, 1),
        lambda: machine.same_step_of_another_model(11, 2),
        lambda: machine.same_step_on_another_cache(13, second),
    )
    for change in changes:
        change()
        check()
        machine.step(0, 0, first, 1, path, "captured", 7)
        check()
        machine.same_step_again(9, "captured")
        check()
    machine.take(0)
    for cache, model in ((second, 0), (second, 0), (second, 1)):
        machine.rebind_taken(0, machine.open.index(cache), model)
    machine.set_layer(first, 0, True)
    machine.rebind_taken(0, machine.open.index(first), 0)
    elsewhere = next(one for one in world.models if one.device == 1)
    far = machine._new_cache(elsewhere, SHAPES[0])
    machine.rebind_taken(0, machine.open.index(far), 0)
    machine.put(1, 0)
    check()
    for choice in (far, second):
        machine._step(StepChoice(1, world.models[0], choice, 1, path, "captured"), 3)
        check()
    for _ in range(3):
        machine.step(1, 0, second, 16, path, "captured", 3)
        check()
    machine.teardown()


def run_machine(world: World, examples: int, steps: int) -> None:
    """Random walks with fixed choices; raises what the first failing one raises."""
    run_state_machine_as_test(
        _machine(world),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
