"""A real object store on this machine: moto's server, a process of its own."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator


START_S = 120.0


@contextlib.contextmanager
def object_store(bucket: str = "bucket") -> Iterator[dict[str, str]]:
    """Starts the server with an empty bucket; what clients find it by in their environment."""
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=log,
            stderr=log,
        )
        try:
            url = _address(server, log)
            make = urllib.request.Request(f"{url}/{bucket}", method="PUT")
            with urllib.request.urlopen(make, timeout=START_S):
                pass
            yield {
                "AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1",
                "AWS_DEFAULT_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true",
            }  # fmt: skip
        finally:
            server.kill()
            server.wait()


def _address(server: subprocess.Popen[bytes], log: object) -> str:
    """Where the server says that it listens: it takes a free port."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        log.seek(0)  # type: ignore[attr-defined]
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read())  # type: ignore[attr-defined]
        if found:
            return found[0]
        time.sleep(0.05)
    log.seek(0)  # type: ignore[attr-defined]
    raise AssertionError(f"moto's server did not start: {log.read()}")  # type: ignore[attr-defined]
