"""Health of a process over HTTP, for the probes of a launcher."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from train.config.errors import UserError
from train.config.schema import ReportSection
from train.distributed.exchange import run_together
from train.distributed.peer_watch import last_progress
from train.distributed.peers import process

HEALTHY = 200
UNHEALTHY = 503
UNKNOWN = 404


@contextmanager
def serving_health(section: ReportSection) -> Iterator[None]:
    """Answers `/healthz` at `report.health_port` inside the block, in every process; a no-op without a port.

    The answer is 200, and 503 after `report.unhealthy_after` without progress. Its body has the process, step and
    phase, and the seconds since the phase began.

    Raises:
      UserError: in every process, if one cannot listen on the port.
    """
    port = section.health_port
    if port is None:
        yield
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            progress = last_progress()
            seconds = time.monotonic() - progress.moved
            late = section.unhealthy_after is not None and seconds > section.unhealthy_after
            status = UNKNOWN if self.path != "/healthz" else UNHEALTHY if late else HEALTHY
            record = {"process": process(), "step": progress.step, "phase": progress.phase}
            body = json.dumps(record | {"seconds_since_progress": round(seconds, 1)}).encode() + b"\n"
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Says nothing: probes come every few seconds."""

    def listen() -> ThreadingHTTPServer:
        try:
            return ThreadingHTTPServer(("", port), Handler)
        except OSError as error:
            raise UserError(
                f"report.health_port: cannot listen on port {port}: {error.strerror}; choose another one, or leave it "
                "out where a host has several processes"
            ) from error

    server = run_together("health", listen)
    thread = threading.Thread(target=server.serve_forever, name="health", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
