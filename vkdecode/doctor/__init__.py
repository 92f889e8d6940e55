"""`vkdecode doctor`: whether a device computes what it should, for its owner and for bug reports."""

from vkdecode.doctor.checks import examine
from vkdecode.doctor.report import Check, Report

__all__ = ["Check", "Report", "examine"]
