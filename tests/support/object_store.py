"""Real object stores on this machine: moto's server and an emulator of Google's, as processes."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path


START_S = 120.0


SERVERS = {
    "s3": ["-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
    "gs": [str(Path(__file__).with_name("gcs_server.py"))],
}


@contextlib.contextmanager
def object_store(scheme: str) -> Iterator[dict[str, str]]:
    """Starts a server with an empty `bucket`; what clients find it by in their environment."""
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen([sys.executable, *SERVERS[scheme]], stdout=log, stderr=log)
        try:
            url = _address(server, log)
            yield _of_s3(url) if scheme == "s3" else {
                "STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url,
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
            }  # fmt: skip
        finally:
            server.kill()
            server.wait()


def _of_s3(url: str) -> dict[str, str]:
    make = urllib.request.Request(f"{url}/bucket", method="PUT")
    with urllib.request.urlopen(make, timeout=START_S):
        pass
    return {
        "AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip


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
    raise AssertionError(f"the server did not start: {log.read()}")  # type: ignore[attr-defined]
