"""The server of an endpoint: uvicorn in a thread of its own."""

import logging
import os
import socket
import threading
import time
from typing import Any

import uvicorn

from train.config.errors import UserError
from train.rollouts.endpoint.app import Endpoint
from train.rollouts.endpoint.completions import Served
from train.rollouts.endpoint.generator import Generator

START_SECONDS = 30.0
STOP_SECONDS = 5.0
SEND_BUFFER = 2**17


class Listener:
    """A server that is started, and serves until it is closed.

    Attributes:
      url: its address, without a path.
    """

    def __init__(self, app: Any, host: str, port: int, *, field: str, most: int) -> None:
        """Starts the server.

        Args:
          app: an ASGI application.
          host: address to listen on.
          port: 0: a free one.
          field: the name of `host` and `port` in errors, such as `rollout.source.port`.
          most: connections at one time.

        Raises:
          UserError: nobody may listen there.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise UserError(f"{field}: cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from error
        # What a slow reader leaves in the buffers of the system is little, too.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        # It tells of readers that left; faults of the routes have a log of their own.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",
            loop="asyncio",
            limit_concurrency=most,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="endpoint", daemon=True)
        self._thread.start()
        began = time.monotonic()
        while not self._server.started and self._thread.is_alive() and time.monotonic() - began < START_SECONDS:
            time.sleep(0.01)
        if not self._server.started:
            raise UserError(f"{field}: the server on {self.url} does not start")

    def close(self) -> None:
        """Ends the server and its connections."""
        self._server.should_exit = True
        self._thread.join(STOP_SECONDS)
        self._socket.close()


def listen(served: Served, generator: Generator, host: str, port: int, *, field: str) -> Listener:
    """Starts the server of an endpoint, for as many connections as its requests need; errors as of `Listener`."""
    most = 4 * served.max_requests + 64
    return Listener(Endpoint(served, generator).app, host, port, field=field, most=most)
