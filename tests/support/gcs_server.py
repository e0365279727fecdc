"""A server that speaks Google Cloud Storage, on this machine: `python gcs_server.py`.

gcp-storage-emulator lists objects by prefix alone; Google's lists also between `startOffset` and
`endOffset`, which tensorstore asks for. Nor does it take an empty object.
"""

from __future__ import annotations

import threading
from typing import Any

from gcp_storage_emulator.handlers import objects


LISTED = objects.ls


def within(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
    """What the emulator lists, between the offsets."""
    start, end = (request.query.get(name, [""])[0] for name in ("startOffset", "endOffset"))
    send = response.json

    def between(found: dict[str, Any]) -> None:
        items = found.get("items") or ()
        kept = [x for x in items if start <= x["name"] and (not end or x["name"] < end)]
        send({**found, "items": kept})

    response.json = between
    LISTED(request, response, storage, *args, **kwargs)


def main() -> None:
    """Serves until it is ended."""
    objects.ls = within
    from gcp_storage_emulator import server as emulator  # which takes the handlers as they are

    read = emulator._read_data
    emulator._read_data = lambda *args: read(*args) or b""
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    print(f"http://127.0.0.1:{server._api._httpd.server_port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
