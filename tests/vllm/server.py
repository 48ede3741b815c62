"""A vLLM server as a person starts one for asyncrl, on a CPU (docs/engines.md)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from asyncrl.collectors.engines.vllm_server import VllmServerEngine
from tests.processes import children, within

from .models import SLOTS

ROOT = Path(__file__).parents[2]
KEY_ENV = "ASYNCRL_TEST_VLLM_KEY"
KEY = "a-key-of-the-tests"

FOR_ASYNCRL = (
    "--tokens-only",
    *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--generation-config", "vllm"),
    *("--hf-overrides", '{"head_dtype": "float32"}'),
    *("--worker-extension-cls", "asyncrl.collectors.engines.vllm_worker.WorkerPart"),
    *("--weight-transfer-config", '{"backend": "asyncrl"}'),
)
ON_A_CPU = ("--enforce-eager", "--no-enable-chunked-prefill", "--kv-cache-memory-bytes", str(256 << 20))


class Server:
    """`url`, and the process that answers there."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """With all of its processes, as the kernel does when memory is short."""
        for process in [*children(self.process.pid), self.process]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(30)


@contextmanager
def serving(
    model: Path, log: Path, *arguments: str, slots: int = SLOTS, limit_s: float = 300, dev_mode: bool = True
) -> Iterator[Server]:
    """A server that is ready. It is killed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": str(int(dev_mode)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--api-key", KEY),
        *("--dtype", "float32", "--max-num-seqs", str(slots), *ON_A_CPU, *arguments),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    server = Server(process, port, log)
    try:
        assert within(limit_s, server.ready), log.read_text()[-4000:]
        yield server
    finally:
        server.kill()


def make_server_engine(
    url: str, model: Path, *, slots: int = SLOTS, dtype: str = "float32", key: str = KEY_ENV
) -> VllmServerEngine:
    """model: the folder of the server's model, for its tokenizer."""
    os.environ[KEY_ENV] = KEY
    return VllmServerEngine(
        "e0",
        model,
        url=url,
        api_key_env=key,
        slots=slots,
        max_length=None,
        dtype=dtype,
        trust_remote_code=False,
    )
