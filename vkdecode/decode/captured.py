"""The captured session: the recorded sequence itself is held, and each token is a re-submission of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vkdecode.decode.session import DecodeSession, DecodeTokenData
from vkdecode.errors import CaptureRefusedError, ClosedError, InvalidInputError
from vkdecode.gpu import Device
from vkdecode.graph import Op, SymEnv
from vkdecode.runtime import Dispatch

if TYPE_CHECKING:
    from vkdecode.gpu import Recording


class CapturedDecodeSession:
    """A recording of a session's plan up to the logits, submitted again for each token.

    On the device-offset path everything is inside. On the SymEnv path push constants are baked at recording, so the
    recording leaves this token's K and V rows where the projections wrote them, and a one-off recording per token
    puts them at
    the offset.
    """

    def __init__(self, session: DecodeSession, recordings: list[Recording], one_off: bool) -> None:
        self._session = session
        self._recordings = recordings
        self._one_off = one_off
        self._epoch = session.binding_epoch
        self.has_run = False

    @classmethod
    def capture(cls, session: DecodeSession) -> CapturedDecodeSession:
        """Record the session's plan.

        Raises:
            CaptureRefusedError: what leads to the logits holds a COPY, or a dispatch other than a KV write whose push
            constants
                change with every token.

        """
        graph = session.graph
        for node_id in graph.reachable([session.logits_node]):
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
        recordings = session.executable.record(SymEnv(), lambda dispatch: not dispatch.symbols)
        return cls(session, recordings, any(dispatch.symbols for dispatch in dispatches))

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
        self._submit(device, data)
        executable = self._session.executable
        if self._one_off:
            executable.record_effects(sym_env, _is_symbolic).submit()
        return executable.read(self._session.logits_node)

    def run_empty(self, device: Device, data: DecodeTokenData) -> None:
        """Submit with data of no tokens: the driver compiles the kernels, and no row of the cache changes."""
        if data.token_count:
            raise InvalidInputError(f"an empty run takes data of 0 tokens, not of {data.token_count}")
        self._submit(device, data)

    def _submit(self, device: Device, data: DecodeTokenData) -> None:
        if not self.is_current:
            raise ClosedError("the session was bound to another KV cache after this capture; capture it again")
        self._session.check_runnable(device)
        executable = self._session.executable
        self._session.bind(data)
        self.has_run = True
        executable.submit(self._recordings)


def _is_symbolic(dispatch: Dispatch) -> bool:
    return bool(dispatch.symbols)
