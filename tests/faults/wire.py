"""A server on loopback that sends any bytes, with the faults that a real one may have."""

import contextlib
import gzip
import json
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator
from socket import MSG_PEEK, SO_LINGER, SOL_SOCKET, socket
from typing import Any

Reply = Callable[[socket, dict[str, Any]], None]
"""Answers one request on its socket, given the JSON of the request."""


def response(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    """Writes a response of HTTP/1.1 with its length, after which the server closes; `headers` have `-` for `_`."""
    lines = [f"HTTP/1.1 {status}", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def sends(*parts: bytes, pause: float = 0.0) -> Reply:
    """Sends parts, with a pause after each, and closes the connection."""

    def reply(connection: socket, body: dict[str, Any]) -> None:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)

    return reply


def drips(head: bytes, byte: bytes = b" ", pause: float = 0.02, count: int = 1500) -> Reply:
    """Sends a byte now and then, for longer than any limit of time here."""

    def reply(connection: socket, body: dict[str, Any]) -> None:
        connection.sendall(head)
        for _ in range(count):
            connection.sendall(byte)
            time.sleep(pause)

    return reply


def resets(connection: socket, body: dict[str, Any]) -> None:
    """Closes with a reset, in place of an answer."""
    connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))


def hangs(connection: socket, body: dict[str, Any]) -> None:
    """Says nothing, until the client gives up."""
    connection.recv(1)


def zipped(text: bytes) -> bytes:
    """Writes a compressed answer."""
    return response(gzip.compress(text), Content_Encoding="gzip")


def blanks(total: int) -> bytes:
    """Writes a small compressed answer of many bytes."""
    return zipped(b" " * total)


@contextlib.contextmanager
def wire(reply: Callable[[str], Reply]) -> Iterator[str]:
    """Starts a server and yields its address; `reply` returns the answer to a request of a path."""

    class WireHandler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            if self.request.recv(1, MSG_PEEK) == b"\x16":  # the start of TLS, which no server of plain HTTP can read
                self.request.sendall(response(b"", "400 Bad Request"))
                return
            request = self.rfile.readline().split()
            if len(request) < 2:
                return
            length = 0
            while (line := self.rfile.readline()) not in (b"\r\n", b"\n", b""):
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            body = self.rfile.read(length)
            with contextlib.suppress(OSError):
                reply(request[1].decode())(self.request, json.loads(body) if body else {})

    class WireServer(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, *arguments: object) -> None:
            """A client that has gone is no error here."""

        def shutdown_request(self, request: Any) -> None:
            """Closes without a half-closed phase, so that a reset stays one."""
            self.close_request(request)

    server = WireServer(("127.0.0.1", 0), WireHandler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
