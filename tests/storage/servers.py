"""A server of S3 on this machine, behind a proxy that counts, delays and refuses its requests."""

import contextlib
import dataclasses
import http.client
import http.server
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>{}</Message></Error>'
JSON = "application/json"
Rule = Callable[[str, str], "tuple[int, str, str] | float | None"]


@dataclasses.dataclass
class Proxy:
    """Passes requests on to a server.

    Attributes:
      port: of the proxy.
      rule: is called with method and path; returns a status, a code and a message to answer with, seconds to wait, or
        None to pass the request on at once.
      requests: methods and paths of all requests that passed.
    """

    port: int
    rule: Rule = lambda method, path: None
    requests: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def writes(self) -> list[str]:
        """Returns the paths of the objects that were written, in order."""
        return [path for method, path in list(self.requests) if method in ("PUT", "POST")]


def free_port() -> int:
    """Returns a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(program: str, *arguments: str, port: int) -> Iterator[None]:
    """Runs a server of this environment inside the block."""
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{program} does not start")
            time.sleep(0.05)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Generations:
    """The conditions on generations of objects that the emulator of Google Cloud Storage leaves out.

    The emulator ignores `ifGenerationMatch`, and sends no generation with the content of an object, which TensorStore
    needs to replace it.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.lock = threading.Lock()

    def of(self, bucket: str, name: str) -> str:
        """Returns the generation of an object; "0" if there is none."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._target, timeout=60)) as connection:
            connection.request("GET", f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}")
            response = connection.getresponse()
            content = response.read()
        return str(json.loads(content)["generation"]) if response.status == 200 else "0"

    def matches(self, path: str, body: bytes) -> bool:
        """Whether a request to write has the generation that it expects."""
        asked, object_of = self._parts(path)
        wanted = asked.get("ifGenerationMatch")
        if wanted is None or object_of is None:
            return True
        found = re.search(rb'"name": ?"([^"]+)"', body)
        name = asked.get("name") or object_of[1] or (found[1].decode() if found else "")
        return self.of(object_of[0], name) == wanted

    def header(self, path: str) -> list[tuple[str, str]]:
        """Returns the header with the generation of the object whose content a request asks for."""
        asked, object_of = self._parts(path)
        if asked.get("alt") != "media" or object_of is None or not object_of[1]:
            return []
        return [("X-Goog-Generation", self.of(*object_of))]

    def _parts(self, path: str) -> tuple[dict[str, str], tuple[str, str] | None]:
        parts = urllib.parse.urlsplit(path)
        match = re.search(r"/storage/v1/b/([^/]+)/o(?:/(.+))?$", parts.path)
        object_of = None if match is None else (match[1], urllib.parse.unquote(match[2] or ""))
        return dict(urllib.parse.parse_qsl(parts.query)), object_of


@contextlib.contextmanager
def proxy(target: int, generations: Generations | None = None) -> Iterator[Proxy]:
    """Runs a proxy of the server at a port inside the block."""
    passed = Proxy(free_port())

    class ProxyHandler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            ruled = passed.rule(self.command, self.path)
            if isinstance(ruled, tuple):
                status, code, message = ruled
                self._send(status, [("Content-Type", "application/xml")], ERROR.format(code, message).encode())
                return
            if ruled:
                time.sleep(ruled)
            if generations is None:
                self._pass_on(body, [])
            elif self.command in ("PUT", "POST"):
                with generations.lock:
                    if generations.matches(self.path, body):
                        self._pass_on(body, [])
                    else:
                        self._send(
                            412, [("Content-Type", JSON)], b'{"error": {"code": 412, "message": "conditionNotMet"}}'
                        )
            else:
                self._pass_on(body, generations.header(self.path) if self.command == "GET" else [])

        def _pass_on(self, body: bytes, more: list[tuple[str, str]]) -> None:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", target, timeout=60)) as connection:
                connection.request(self.command, self.path, body, headers)
                response = connection.getresponse()
                content = response.read()
            passed.requests.append((self.command, self.path))
            skipped = ("transfer-encoding", "connection", "content-length")
            kept = [(name, value) for name, value in response.getheaders() if name.lower() not in skipped]
            kept += more
            size = response.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            self._send(response.status, kept, content, size)

        def _send(self, status: int, headers: list[tuple[str, str]], content: bytes, size: str | None = None) -> None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.send_response_only(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", size or str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _answer

        def log_message(self, *_: object) -> None:
            pass

    class ProxyServer(http.server.ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            pass

    running = ProxyServer(("127.0.0.1", passed.port), ProxyHandler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield passed
    finally:
        running.shutdown()
        running.server_close()


@contextlib.contextmanager
def s3(bucket: str = "bucket") -> Iterator[tuple[Proxy, dict[str, str]]]:
    """Runs moto's server of S3 with a bucket; yields its proxy, and the variables with which a process finds it."""
    port = free_port()
    with server("moto_server", "-p", str(port), port=port), proxy(port) as passed:
        variables = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{passed.port}",
        }
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            connection.request("PUT", f"/{bucket}")
            assert connection.getresponse().status == 200
        yield passed, variables


def download(env: dict[str, str], address: str, folder: Path) -> Path:
    """Copies all below an address into a new folder."""
    code = f"import fsspec; fsspec.filesystem({address[:2]!r}).get({address + '/'!r}, {f'{folder}/'!r}, recursive=True)"
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    return folder


def step_of(path: str) -> int | None:
    """Returns the step of a checkpoint that the path of an object belongs to."""
    match = re.search(r"/checkpoints/(\d+)/", path)
    return None if match is None else int(match[1])


@contextlib.contextmanager
def gcs(bucket: str = "bucket") -> Iterator[dict[str, str]]:
    """Runs an emulator of Google Cloud Storage with a bucket; yields the variables with which a process finds it."""
    port = free_port()
    arguments = ("start", "--in-memory", "--host", "127.0.0.1", "--port", str(port))
    with server("gcp-storage-emulator", *arguments, port=port), proxy(port, Generations(port)) as passed:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            connection.request("POST", "/storage/v1/b?project=p", json.dumps({"name": bucket}), {"Content-Type": JSON})
            assert connection.getresponse().status == 200
        address = f"http://127.0.0.1:{passed.port}"
        # The first is read by gcsfs, the others by TensorStore.
        yield {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
