"""Where checkpoints are: directories, or folders of object stores, as tensorstore takes them."""

from __future__ import annotations

import os
import re
from typing import Any

from etils import epath

from fzero.errors import CheckpointError


SCHEMES = ("gs", "s3")
# Where an object store is that is not the vendor's own, as botocore reads it.
S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
GS_EMULATOR, GS_ENDPOINT = "STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"
S3_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
# Seconds double from try to try: somewhat over a minute, then who waits hears of it.
RETRIES = {"max_retries": 6}


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is one of an object store.

    Raises:
        CheckpointError: it is a URL of something else, was made a directory's path, or is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            f"checkpoint: {path!r:.60}: expected a directory's path, or a URL, as first argument"
        )
    text = os.fspath(path)
    scheme, colon, rest = text.partition(":/")
    if not colon or not (scheme in SCHEMES or (scheme.isalnum() and rest.startswith("/"))):
        return False
    if scheme in SCHEMES and re.match(r"/[^/]+/.", rest):
        return True
    raise CheckpointError(
        f"checkpoint: {text}: expected a directory, or {' or '.join(f'{s}://' for s in SCHEMES)}"
        " with a bucket and a path in it, as text: a pathlib.Path takes a slash out of a URL"
    )


def folder_of(url: str) -> Any:
    """A URL as something that `/` and `str` work with."""
    return epath.Path(url.rstrip("/"))


def kvstore(folder: Any) -> dict[str, Any]:
    """A directory, or an object store's folder, as tensorstore takes it.

    Args:
        folder: an absolute path, or `scheme://bucket/path`.
    """
    url = str(folder)
    if not is_url(url):
        # Not as a URL, in which `%41` is an A and `?` ends the path.
        return {"driver": "file", "path": f"{url}/"}
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.strip("/").partition("/")
    spec: dict[str, Any] = {"bucket": bucket, "path": f"{path}/"}
    if scheme == "gs":
        _require_one_store()
        return {"driver": "gcs", **spec, "context": {"gcs_request_retries": RETRIES}}
    spec |= {"driver": "s3", "context": {"s3_request_retries": RETRIES}}
    endpoint = next((os.environ[name] for name in S3_ENDPOINTS if name in os.environ), None)
    if endpoint is not None:  # which tensorstore does not read
        region = next((os.environ[n] for n in S3_REGIONS if n in os.environ), "us-east-1")
        spec |= {"endpoint": endpoint, "aws_region": region}
    return spec


def _require_one_store() -> None:
    """Refuses an emulator that Google's clients go to, and tensorstore does not."""
    if GS_EMULATOR in os.environ and GS_ENDPOINT not in os.environ:
        at = os.environ[GS_EMULATOR]
        raise CheckpointError(
            f"checkpoint: {GS_EMULATOR}={at} says that gs:// is an emulator, which tensorstore does"
            f" not read: expected {GS_ENDPOINT} with the same address (and a"
            " GOOGLE_AUTH_TOKEN_FOR_TESTING, where it asks for no real one)"
        )
