"""The one place where the Kompute binding (`kp`) is imported."""

from __future__ import annotations

import logging
from typing import Any

from vkdecode.errors import DeviceError


def load_kompute() -> Any:
    """Import `kp`.

    Raises:
        DeviceError: it is not installed, or does not load.

    """
    root = logging.getLogger()
    handlers = list(root.handlers)
    try:
        import kp
    except ImportError as error:
        raise DeviceError(f"Kompute (the Python module kp) does not load: {error}; run `make setup`") from error
    # Importing kp configures the root logger; the program's own logging is left as it was.
    root.handlers[:] = handlers
    return kp
