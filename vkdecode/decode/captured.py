"""The captured session: the recorded sequence itself is held, and each token is a re-submission of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vkdecode.decode.candidates import Candidates
from vkdecode.decode.session import DecodeSession, DecodeTokenData
from vkdecode.errors import CaptureRefusedError, ClosedError, InvalidInputError
from vkdecode.gpu import Device
from vkdecode.graph import NodeId, Op, SymEnv
from vkdecode.runtime import Dispatch

if TYPE_CHECKING:
    from vkdecode.gpu import Recording


class CapturedDecodeSession:
    """A recording of a session's plan up to the logits, submitted again for each token.

    Candidates are computed from the logits in a recording of their own, which is made when they are first asked for.

    On the device-offset path everything is inside. On the SymEnv path push constants are baked at recording, so the
    recording leaves this token's K and V rows where the projections wrote them, and a one-off recording per token
    puts them at
    the offset.
    """

    def __init__(self, session: DecodeSession, one_off: bool) -> None:
        self._session = session
        self._recordings: dict[NodeId, list[Recording]] = {}
        self._one_off = one_off
        self._epoch = session.binding_epoch
        self._have_run: set[NodeId] = set()

    @classmethod
    def capture(cls, session: DecodeSession, wanted: NodeId | None = None) -> CapturedDecodeSession:
        """Record the session's plan up to `wanted`: the logits, or a list of candidates.

        Raises:
            CaptureRefusedError: what leads to the logits holds a COPY, or a dispatch other than a KV write whose push
            constants
                change with every token.

        """
        graph = session.graph
        for node_id in graph.reachable([session.logits_node, *session.candidates_nodes]):
            if graph.node(node_id).op is Op.COPY:
                raise CaptureRefusedError(
                    f"node {node_id} copies between places and cannot be captured; use the held plan"
                )
        dispatches = session.executable.plan.dispatches
        for dispatch in dispatches:
            if dispatch.symbols and graph.node(dispatch.node).op is not Op.KV_WRITE:
                names = ", ".join(map(str, dispatch.symbols))
                raise CaptureRefusedError(
                    f"kernel '{dispatch.kernel.key}' bakes {names} and cannot be captured; use the held plan"
                )
        made = cls(session, any(dispatch.symbols for dispatch in dispatches))
        made.record(session.logits_node if wanted is None else wanted)
        return made

    def record(self, wanted: NodeId) -> bool:
        """Record the plan up to this node where that has not been done; whether it was done now.

        Raises:
            ClosedError: the session was bound to another cache, or closed, since the capture.

        """
        self._check_current()
        if wanted in self._recordings:
            return False
        needed = self._session.needed_for(wanted)
        self._recordings[wanted] = self._session.executable.record(
            SymEnv(), lambda dispatch: needed(dispatch) and not dispatch.symbols
        )
        return True

    @property
    def has_run(self) -> bool:
        """Whether the recording of the logits has been submitted."""
        return self.has_run_for(self._session.logits_node)

    def has_run_for(self, wanted: NodeId) -> bool:
        """Whether the recording up to this node has been submitted."""
        return wanted in self._have_run

    @property
    def needs_one_off(self) -> bool:
        """Whether each token also takes a one-off recording for its KV writes."""
        return self._one_off

    @property
    def is_current(self) -> bool:
        """Whether the session still binds the storages that were recorded."""
        return self._epoch == self._session.binding_epoch

    def replay_token(self, device: Device, data: DecodeTokenData, sym_env: SymEnv) -> NDArray[np.float32]:
        """Bind a step's data and submit the held recording; logits [rows, vocab] flat.

        Raises:
            ClosedError: the session was bound to another cache, or closed, since the capture.
            TopologyChanged: its graph was changed.

        """
        self._replay(device, data, sym_env, self._session.logits_node)
        return self._session.executable.read(self._session.logits_node)

    def replay_candidates(self, device: Device, data: DecodeTokenData, sym_env: SymEnv, count: int) -> Candidates:
        """The same, but only the `count` highest logits are read; raises like `replay_token`.

        Raises:
            InvalidInputError: the plan has no list of so many.

        """
        self._replay(device, data, sym_env, self._session.wanted_node(count))
        return self._session.read_candidates(count)

    def run_empty(self, device: Device, data: DecodeTokenData, wanted: NodeId | None = None) -> None:
        """Submit with data of no tokens: the driver compiles the kernels, and no row of the cache changes."""
        if data.token_count:
            raise InvalidInputError(f"an empty run takes data of 0 tokens, not of {data.token_count}")
        self._submit(device, data, self._session.logits_node if wanted is None else wanted)

    def _replay(self, device: Device, data: DecodeTokenData, sym_env: SymEnv, wanted: NodeId) -> None:
        self._submit(device, data, wanted)
        if self._one_off:
            self._session.executable.record_effects(sym_env, _is_symbolic).submit()

    def _submit(self, device: Device, data: DecodeTokenData, wanted: NodeId) -> None:
        self.record(wanted)
        self._session.check_runnable(device)
        self._session.bind(data)
        self._have_run.add(wanted)
        self._session.executable.submit(self._recordings[wanted])

    def _check_current(self) -> None:
        if not self.is_current:
            raise ClosedError("the session was bound to another KV cache after this capture; capture it again")


def _is_symbolic(dispatch: Dispatch) -> bool:
    return bool(dispatch.symbols)
