"""Servers in a thread: one that answers as it is told, and answers that are good enough to train on."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, str] | None
PROBES = 3
"""Requests that a source makes before a run, if it records log-probs."""
NEEDED = {
    "model": str,
    "prompt": list,
    "n": 1,
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "ignore_eos": bool,
    "skip_special_tokens": True,
    "watermarking": False,
    "watermark": {"enabled": False},
    "seed": int,
    "stop_token_ids": list,
    "return_token_ids": True,
}
"""The fields of a request, each a type or a value: a server has defaults of its own for those that are left out."""


def wrong_fields(body: dict[str, Any]) -> list[str]:
    """The needed fields that a request lacks, or that have another type or value."""

    def fits(name: str, needed: Any) -> bool:
        return isinstance(body[name], needed) if isinstance(needed, type) else body[name] == needed

    return [name for name, needed in NEEDED.items() if name not in body or not fits(name, needed)]


@contextlib.contextmanager
def serving(
    answer: Callable[[str, dict], Answer], *, seen: list[dict[str, str]] | None = None, **headers: str
) -> Iterator[str]:
    """The address of a server; `answer` gives status and text, or None to close the connection without one.

    `seen` gets the headers of the requests.
    """

    class FakeHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if seen is not None:
                seen.append(dict(self.headers))
            arguments = answer(self.path, json.loads(body) if body else {})
            if arguments is None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            text = arguments[1].encode()
            self.send_response(arguments[0])
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST

        def log_message(self, *arguments: object) -> None:
            pass

    class FakeServer(ThreadingHTTPServer):
        request_queue_size = 64  # more connections at a time than any client here makes

    server = FakeServer(("127.0.0.1", 0), FakeHandler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Digits:
    """Completes every prompt with a digit that its seed decides, and ends it. Dies after so many completions.

    Its log-probs are those at temperature 1. Digits go on where the end is to be ignored.
    """

    def __init__(self, eos_id: int, lives: int = 10**9) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._eos_id, self._lives, self._lock = eos_id, lives, threading.Lock()

    def __call__(self, path: str, body: dict) -> Answer:
        """One answer."""
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "m"}]})
        if path != "/v1/completions":
            return 404, '{"detail":"Not Found"}'
        with self._lock:
            self.bodies.append(body)
            self._lives -= 1
        if self._lives < 0:
            return None
        if wrong := wrong_fields(body):
            return 400, f"missing or wrong: {', '.join(wrong)}"
        return 200, json.dumps({"choices": [self._choice(body)]})

    def _choice(self, body: dict) -> dict:
        tokens = [ord("0") + body["seed"] % 10, self._eos_id][: body["max_tokens"]]
        if body["ignore_eos"]:
            tokens = tokens[:1] * body["max_tokens"]
        return {
            "index": 0,
            "token_ids": tokens,
            "logprobs": {"token_logprobs": ([-2.0] + [-1.0] * len(tokens))[: len(tokens)]},
            "finish_reason": "stop" if tokens[-1] == self._eos_id else "length",
        }
