"""Tokens per second against context length, as a picture; needs matplotlib, which is an extra."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from vkdecode.bench.result import BenchResult
from vkdecode.errors import InvalidInputError, VkDecodeError

ENDINGS = (".png", ".svg")


def check_plot(path: str) -> Path:
    """The path of a picture, checked before anything is measured.

    Raises:
        InvalidInputError: another ending than .png or .svg, or no folder to write to.
        VkDecodeError: matplotlib is not installed.

    """
    file = Path(path)
    if file.suffix.lower() not in ENDINGS:
        raise InvalidInputError(f"--plot {path!r:.60} must end with {' or '.join(ENDINGS)}")
    check_writable(file, "--plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise VkDecodeError("--plot needs matplotlib, which is not installed; pip install 'vkdecode[plot]'")
    return file


def check_writable(file: Path, option: str) -> None:
    """Raise `InvalidInputError` where a file cannot be made or replaced."""
    folder = file.parent
    if not folder.is_dir() or file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise InvalidInputError(f"{option}: cannot write {str(file)!r:.120}; give a file in a folder that exists")


def save_plot(result: BenchResult, path: Path) -> None:
    """Draw the decode speeds of a run and write a .png or .svg file."""
    # The object interface: pyplot would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    decode, model = result.decode, result.facts["model"]
    largest = max(model["held_bytes"], key=lambda held: model["held_bytes"][held])
    contexts = [one.speed.context for one in decode]
    speeds = [one.speed.tokens_per_second for one in decode]
    slowest = [1000.0 / one.speed.worst_milliseconds for one in decode]
    fastest = [1000.0 / one.speed.best_milliseconds for one in decode]
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(contexts, speeds, marker="o", label="median")
    axes.fill_between(contexts, slowest, fastest, alpha=0.2, label="slowest to fastest step")
    axes.set_xlabel("tokens in the KV cache")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"{model['name']}, {largest}\n{result.facts['device']['name']}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
