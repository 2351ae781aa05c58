"""``python -m tests.live.google_gateway PORT UPSTREAM``: requests to fake-gcs-server, completed.

fake-gcs-server knows the JSON protocol, which pyarrow speaks. Of the XML protocol, which delta-rs
speaks, it knows only reading, and not where a listing starts. A write is translated into one of the
JSON protocol, with its condition; a listing is cut.

A process of its own: delta-rs holds Python's lock while it reads the history of a table.
"""

from __future__ import annotations

import html
import http.client
import http.server
import json
import re
import sys
import urllib.parse
import uuid
from typing import Any, cast

# Headers of one connection, not of what travels over it.
_HOP_HEADERS = {"host", "connection", "content-length", "transfer-encoding", "expect"}


class _Gateway(http.server.ThreadingHTTPServer):
    """Forwards requests to fake-gcs-server at a port."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], port: int) -> None:
        super().__init__(address, _Forwarder)
        self.port = port

    def request(
        self, method: str, target: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()


def _as_json_protocol(
    method: str, target: str, headers: dict[str, str], body: bytes
) -> tuple[str, str, bytes, dict[str, str]]:
    """Return a request that writes or deletes by the XML protocol as one of the JSON protocol, and
    any other as it is.
    """
    bucket, _, name = urllib.parse.urlsplit(target).path.lstrip("/").partition("/")
    name = urllib.parse.unquote(name)
    if method not in ("PUT", "DELETE") or bucket in ("storage", "upload"):
        return method, target, body, headers
    if method == "DELETE":
        return method, f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}", b"", {}
    condition = headers.get("x-goog-if-generation-match")
    query = "" if condition is None else f"&ifGenerationMatch={condition}"
    # An upload in one part is not made conditional by fake-gcs-server.
    parts = (
        b"--part\r\nContent-Type: application/json\r\n\r\n"
        + json.dumps({"name": name}).encode()
        + b"\r\n"
        b"--part\r\nContent-Type: application/octet-stream\r\n\r\n" + body + b"\r\n--part--\r\n"
    )
    content = {"Content-Type": "multipart/related; boundary=part"}
    return "POST", f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart{query}", parts, content


def _after_start(target: str, listing: bytes) -> bytes:
    """Return a listing without the names up to its ``start-after``, which fake-gcs-server
    ignores.
    """
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(target).query))
    if "start-after" not in query:
        return listing

    def kept(found: re.Match[bytes]) -> bytes:
        return found[0] if html.unescape(found[1].decode()) > query["start-after"] else b""

    return re.sub(rb"<Contents><Key>(.*?)</Key>.*?</Contents>", kept, listing, flags=re.DOTALL)


class _Forwarder(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _forward(self) -> None:
        gateway = cast("_Gateway", self.server)
        # The host decides for fake-gcs-server which protocol a path belongs to.
        headers = {
            name.lower(): value
            for name, value in self.headers.items()
            if name.lower() not in _HOP_HEADERS
        }
        request = _as_json_protocol(self.command, self.path, headers, self._body())
        status, answered, data = gateway.request(*request)
        data = _after_start(self.path, data)
        self.send_response(status)
        for name, value in answered.items():
            if name.lower() not in _HOP_HEADERS:
                self.send_header(
                    name, value.replace(f":{gateway.port}", f":{gateway.server_address[1]}")
                )
        if "etag" not in {name.lower() for name in answered}:
            self.send_header("ETag", f'"{uuid.uuid4().hex}"')
        self.send_header(
            "Content-Length",
            answered["Content-Length"] if self.command == "HEAD" else str(len(data)),
        )
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _forward

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


if __name__ == "__main__":
    _Gateway(("127.0.0.1", int(sys.argv[1])), int(sys.argv[2])).serve_forever()
