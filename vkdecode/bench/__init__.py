"""Measuring a model on a device: speed, bytes and memory, as a table, as JSON and as a plot.

Times are of whole calls from Python. Speed is measured here, never in a test.
"""

from vkdecode.bench.options import BenchOptions, counts
from vkdecode.bench.plot import check_plot, check_writable, save_plot
from vkdecode.bench.report import tables
from vkdecode.bench.result import SCHEMA, BenchResult
from vkdecode.bench.run import run_bench
from vkdecode.bench.shapes import BUILT_IN
from vkdecode.bench.synthetic import SyntheticSource, synthetic_source

__all__ = [
    "BUILT_IN",
    "SCHEMA",
    "BenchOptions",
    "BenchResult",
    "SyntheticSource",
    "check_plot",
    "check_writable",
    "counts",
    "run_bench",
    "save_plot",
    "synthetic_source",
    "tables",
]
