"""A pytest plugin: writes each test's end, as it comes, to the file of FZERO_TESTS_REPORT."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


_seen: dict[str, str] = {}


def pytest_runtest_logreport(report: Any) -> None:
    """Keeps why a test failed; the empty string where it passed."""
    if report.skipped:
        return
    if report.failed:
        crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
        _seen[report.nodeid] = str(crash or report.longrepr)[-600:] or "failed"
    elif report.when == "call":
        _seen.setdefault(report.nodeid, "")
    Path(os.environ["FZERO_TESTS_REPORT"]).write_text(json.dumps(_seen))
