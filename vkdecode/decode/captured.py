"""The captured session: the recorded sequence itself is held, and each token is a re-submission of it."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from vkdecode.decode.session import DecodeSession, DecodeTokenData, StepResult
from vkdecode.decode.top_k import Candidates
from vkdecode.errors import CaptureRefusedError, ClosedError, InvalidInputError
from vkdecode.gpu import Device, Recording
from vkdecode.graph import NodeId, Op, SymEnv
from vkdecode.runtime import Dispatch


class CapturedDecodeSession:
    """Recordings of a session's plan, submitted again for each token: one up to the logits, one for each list of top k.

    On the device-offset path everything is inside. On the SymEnv path push constants are baked at recording, so the
    recording leaves this token's K and V rows in the landing rows, and a one-off recording per token moves them to the
    offset.
    """

    def __init__(self, session: DecodeSession, needs_one_off: bool) -> None:
        self._session = session
        self._recordings: dict[NodeId, list[Recording]] = {}
        self._needs_one_off = needs_one_off
        self._epoch = session.binding_epoch
        self._have_run: set[NodeId] = set()

    @classmethod
    def capture(cls, session: DecodeSession, want: int = 0) -> CapturedDecodeSession:
        """Record the session's plan up to the logits, or to a list of so many of the highest.

        Raises:
            CaptureRefusedError: what leads to the logits holds a COPY, or a dispatch other than a move of KV rows whose
                push constants change with every token.

        """
        graph = session.graph
        for node_id in graph.reachable([session.logits_node, *session.top_k_nodes]):
            if graph.node(node_id).op is Op.COPY:
                raise CaptureRefusedError(
                    f"node {node_id} copies between places and cannot be captured; use the held plan"
                )
        symbolic = [one for one in session.executable.plan.dispatches if one.symbols]
        for dispatch in symbolic:
            if graph.node(dispatch.node).op is not Op.KV_MOVE:
                names = ", ".join(map(str, dispatch.symbols))
                raise CaptureRefusedError(
                    f"kernel '{dispatch.kernel.key}' bakes {names} and cannot be captured; use the held plan"
                )
        made = cls(session, bool(symbolic))
        made.record(want)
        return made

    def record(self, want: int) -> bool:
        """Record the plan for what is wanted where that has not been done; whether it was done now.

        Raises:
            ClosedError: the session was bound to another cache, or closed, since the capture.

        """
        if not self.is_current:
            raise ClosedError("the session was bound to another KV cache after this capture; capture it again")
        node = self._session.wanted_node(want)
        if node in self._recordings:
            return False
        self._recordings[node] = self._session.record(SymEnv(), want, lambda one: not one.symbols)
        return True

    @property
    def needs_one_off(self) -> bool:
        """Whether each token also takes a one-off recording, which moves its K and V rows."""
        return self._needs_one_off

    @property
    def is_current(self) -> bool:
        """Whether the session still binds the storages that were recorded."""
        return self._epoch == self._session.binding_epoch

    def replay_token(self, device: Device, data: DecodeTokenData, sym_env: SymEnv) -> NDArray[np.float32]:
        """Submit the held recording for one step; logits [rows, vocab] flat. Raises like `run`."""
        return cast(NDArray[np.float32], self.run(device, data, sym_env))

    def replay_top_k(self, device: Device, data: DecodeTokenData, sym_env: SymEnv, k: int) -> Candidates:
        """The same, but only the `k` highest logits are read. Raises like `run`."""
        return cast(Candidates, self.run(device, data, sym_env, k))

    def run(self, device: Device, data: DecodeTokenData, sym_env: SymEnv, want: int = 0) -> StepResult:
        """Bind a step's data, submit the held recording, and read what is wanted; see `DecodeSession.run`.

        Raises:
            ClosedError: the session was bound to another cache, or closed, since the capture.
            VkDecodeError: like `DecodeSession.run`.

        """
        session = self._session
        self.record(want)
        node = session.wanted_node(want)
        result = session.run(device, data, sym_env, want, self._recordings[node])
        self._have_run.add(node)
        if self._needs_one_off and data.token_count:
            session.executable.record_effects(sym_env, _is_symbolic).submit()
        return result

    def run_empty(self, device: Device, data: DecodeTokenData, want: int = 0) -> None:
        """Submit once with data of no tokens: the driver compiles the kernels, and no row of the cache changes."""
        if data.token_count:
            raise InvalidInputError(f"an empty run takes data of 0 tokens, not of {data.token_count}")
        if self._session.wanted_node(want) not in self._have_run:
            self.run(device, data, SymEnv(), want)


def _is_symbolic(dispatch: Dispatch) -> bool:
    return bool(dispatch.symbols)
