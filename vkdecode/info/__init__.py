"""`vkdecode info`: what a model's files hold, and whether the model will run here."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vkdecode.options import DeviceOption, ModelArgument, WeightsOption


def info(
    model: ModelArgument,
    context: Annotated[
        int | None,
        typer.Option("--context", min=1, help="Positions of the KV cache. [default: the model's, at most 4096]"),
    ] = None,
    kv: Annotated[str, typer.Option("--kv", metavar="f32|f16", help="Element type of the KV cache.")] = "f32",
    device: DeviceOption = None,
    weights: WeightsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what a model is, what memory it takes, and whether it will run here.

    Only headers are read and nothing is put on the device. The exit code is 0 also where the model will not run; the
    last line says why, `--json` in `problems`.
    """
    import json

    from vkdecode.info.inspect_model import inspect_model
    from vkdecode.info.text import as_text

    found = inspect_model(model, device, weights, context, kv)
    print(json.dumps(found.as_json(), indent=2, ensure_ascii=not sys.stdout.isatty()) if as_json else as_text(found))
