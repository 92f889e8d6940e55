"""What the doctor found: checks with a status and a number, as a table and as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

SCHEMA = 1
OK, FAULT, NOTE = "ok", "fault", "note"


@dataclass(frozen=True)
class Finding:
    """What one check says: a status (`ok`, `fault` or `note`), a line of text and, where there is one, a number.

    `subjects` are what is at fault inside the check, such as the keys of kernels.
    """

    status: str
    text: str
    number: float | None = None
    unit: str = ""
    subjects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    group: str
    name: str
    status: str
    text: str
    number: float | None
    unit: str
    subjects: tuple[str, ...]
    milliseconds: float


@dataclass
class Report:
    """All that a bug report needs.

    Attributes:
        facts: versions, device and lanes, as JSON values.
        checks: in the order in which they ran.
        kernels_run: keys of the kernels that were held against references.
        kernels_known: how many kernels there are.

    """

    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    kernels_run: list[str] = field(default_factory=list)
    kernels_known: int = 0

    def run(self, group: str, name: str, check: Callable[[], Finding]) -> None:
        """Run a check and keep what it found; whatever it raises is a fault of it."""
        started = time.perf_counter()
        try:
            found = check()
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            found = Finding(FAULT, message)
        spent = 1000.0 * (time.perf_counter() - started)
        values = (found.status, found.text, found.number, found.unit, found.subjects)
        self.checks.append(Check(group, name, *values, spent))

    @property
    def faults(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.status == FAULT]

    def verdict(self) -> str:
        """One line: that all is well, or which checks are faults."""
        kernels = f"{len(self.kernels_run)} of {self.kernels_known} kernels were run"
        if self.faults:
            names = "; ".join(
                f"{check.group} {check.name}" + (f" ({', '.join(check.subjects)})" if check.subjects else "")
                for check in self.faults
            )
            return f"{len(self.faults)} of {len(self.checks)} checks are faults: {names} ({kernels})"
        return f"no fault in {len(self.checks)} checks ({kernels})"

    def as_json(self) -> Mapping[str, Any]:
        """Values for `json.dumps`."""
        return {
            "schema": SCHEMA,
            "ok": not self.faults,
            "verdict": self.verdict(),
            **self.facts,
            "kernels": {"run": self.kernels_run, "known": self.kernels_known},
            "checks": [asdict(check) for check in self.checks],
        }

    def table(self) -> Table:
        """One row for each check."""
        table = Table("check", "", "", "number", "what")
        table.columns[3].justify = "right"
        colours = {OK: "green", FAULT: "bold red", NOTE: "yellow"}
        for check in self.checks:
            number = "" if check.number is None else f"{check.number:.3g} {check.unit}".strip()
            table.add_row(
                Text(check.group),
                Text(check.name),
                Text(check.status, style=colours[check.status]),
                Text(number),
                Text(check.text),
            )
        return table
