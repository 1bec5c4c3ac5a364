"""The endpoint behind its server: clients that leave or read slowly, and many of them at once."""

import json
import socket
import time
from contextlib import closing

import numpy as np
import pytest

from tests.train.rollouts.endpoint import load
from tests.train.rollouts.endpoint.fakes import running
from train.config.errors import UserError
from train.rollouts.endpoint import app
from train.rollouts.endpoint.completions import EndpointKeys
from train.rollouts.endpoint.listen import Listener
from train.rollouts.endpoint.sessions import SequenceLengths


def listening(served):
    return closing(Listener(served.endpoint.app, "127.0.0.1", 0, field="--port", most=64))


def sent(listener, **body):
    """Sends a request for a completion, and returns the socket."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", int(listener.url.rpartition(":")[2])))
    data = json.dumps({"prompt": [256, 97], "max_tokens": 50_000, **body}).encode()
    connection.sendall(load.request("/v1/completions", data, "none"))
    return connection


def wait_until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within 10 s")


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_frees_its_row(stream):
    with (
        running(lambda text: "...", lengths=SequenceLengths(4, 60_000), pause=0.001) as served,
        listening(served) as listener,
    ):
        connection = sent(listener, stream=stream)
        wait_until(served.engine.active.__len__)
        connection.close()
        wait_until(lambda: served.generator.open == 0)
        assert served.engine.cancelled == 1
        assert served.engine.is_idle()
        wait_until(lambda: served.endpoint.clients_gone == 1)


def test_program_that_left_takes_no_episode():
    keys = EndpointKeys(None, "sk-reward")
    with running(str.upper, episodes=True, keys=keys) as served, listening(served) as listener:
        connection = socket.create_connection(("127.0.0.1", int(listener.url.rpartition(":")[2])))
        connection.sendall(load.request("/v1/episodes", b"{}", "sk-reward"))
        connection.close()
        # Before there is an episode, for which it would wait.
        wait_until(lambda: served.endpoint.clients_gone == 1)
        served.sessions.open([{}], [np.zeros(2, np.uint32)], SequenceLengths(4, 4))
        assert served.sessions.take(0.0) is not None


def test_reader_of_a_stream_that_stops_ends_it(monkeypatch):
    monkeypatch.setattr(app, "SEND_SECONDS", 0.3)
    with (
        running(lambda text: "...", lengths=SequenceLengths(4, 60_000)) as served,
        listening(served) as listener,
        closing(sent(listener, stream=True, logprobs=1)),
    ):
        wait_until(lambda: served.endpoint.clients_gone == 1)
        wait_until(lambda: served.generator.open == 0)


def test_load_with_faults_loses_no_answer():
    counts = load.run(agents=12, actions=8, seconds=0, most_growth=64)
    assert counts["received"] > 20


def test_port_that_is_taken_is_named():
    with running(str.upper) as served, listening(served) as listener:
        port = int(listener.url.rpartition(":")[2])
        with pytest.raises(UserError, match=rf"^--port: cannot listen on 127.0.0.1:{port}: Address already in use$"):
            Listener(served.endpoint.app, "127.0.0.1", port, field="--port", most=64)
