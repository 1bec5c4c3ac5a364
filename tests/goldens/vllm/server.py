"""A vLLM of its own for one model folder, from an environment that is not the one of the tests."""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

# vLLM on a CPU, offline, with the endpoints that weights are given through.
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_SERVER_DEV_MODE": "1",
}
OPTIONS = ("--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "16", "--enforce-eager")
LORA = ("--enable-lora", "--max-lora-rank", "8")
START_SECONDS = 300


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that the commands of live servers have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="the program `vllm` of its environment")
    log = Path(tempfile.gettempdir()) / "kljax-vllm.log"
    parser.add_argument("--log", type=Path, default=log, help="of the servers")
    return parser


def free_port() -> int:
    """A port that nothing listens to now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def serving(vllm: Path, folder: Path, name: str, log: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """The address of a vLLM that serves `folder` under `name`, and its process, which is ended afterwards."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(vllm), "serve", str(folder), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    # The environment's own programs, such as the compiler wrappers that vLLM calls.
    env = {**os.environ, **SETTINGS, "PATH": f"{vllm.parent}:{os.environ['PATH']}"}
    with log.open("a") as output:
        process = subprocess.Popen(
            [*command, *OPTIONS, *options], stdout=output, stderr=subprocess.STDOUT, env=env, process_group=0
        )
    try:
        _wait(url, process, log)
        yield url, process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        # Its engine and workers outlive a server that was killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _wait(url: str, process: subprocess.Popen, log: Path) -> None:
    began = time.monotonic()
    while time.monotonic() - began < START_SECONDS and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=2).is_success:
                return
        time.sleep(1)
    raise RuntimeError(f"vLLM did not start (exit code {process.poll()}); its output is in {log}")
