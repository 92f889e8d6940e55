"""The one place where the Kompute binding (`kp`) is imported."""

from __future__ import annotations

import logging
from typing import Any

from vkdecode.errors import DeviceError

# The build with a barrier that Python can record; see build_kompute.py.
PATCH = 1
REMEDY = "run `make setup` in a clone, else `python -m vkdecode.gpu.build_kompute --install`"


def load_kompute() -> Any:
    """Import `kp`, in the build that vkdecode needs.

    Raises:
        DeviceError: it is not installed, does not load, or is another build, whose dispatches cannot be ordered.

    """
    root = logging.getLogger()
    handlers = list(root.handlers)
    try:
        import kp
    except ImportError as error:
        raise DeviceError(f"Kompute (the Python module kp) does not load: {error}; {REMEDY}") from error
    # Importing kp configures the root logger; the program's own logging is left as it was.
    root.handlers[:] = handlers
    if getattr(kp, "vkdecode_patch", None) != PATCH or not hasattr(kp, "OpMemoryBarrier"):
        version = getattr(kp, "__version__", "of an unknown version")
        raise DeviceError(f"the Kompute here (kp {version}) is not vkdecode's build of it; {REMEDY}")
    return kp
