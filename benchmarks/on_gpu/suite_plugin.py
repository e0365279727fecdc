"""A pytest plugin: appends each test's end, as it comes, to the file of FZERO_TESTS_REPORT."""

from __future__ import annotations

import json
import os
from typing import Any


# A worker's reports reach the process that started it, which writes them.
_WORKER = "PYTEST_XDIST_WORKER" in os.environ


def pytest_runtest_logreport(report: Any) -> None:
    """Says why a test failed; the empty string where it passed."""
    if _WORKER or report.skipped or (report.passed and report.when != "call"):
        return
    crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
    why = (str(crash or report.longrepr)[-600:] or "failed") if report.failed else ""
    with open(os.environ["FZERO_TESTS_REPORT"], "a") as file:
        file.write(json.dumps([report.nodeid, why]) + "\n")
