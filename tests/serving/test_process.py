"""The life of a server's process: before its model is there, and when it is told to stop."""

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import uvicorn

from nemo_dllm.collections.diffusion.serving import ServedModel, ServerLimits
from nemo_dllm.collections.diffusion.serving.loading import answering_while_loading
from nemo_dllm.collections.diffusion.serving.server import run_until_stopped

# A toy that takes its time, in a process of its own.
SCRIPT = """
import importlib.util, socket, sys, time
spec = importlib.util.spec_from_file_location("toys", sys.argv[1])
toys = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toys)
from nemo_dllm.collections.diffusion.serving import ServedModel, ServerLimits
from nemo_dllm.collections.diffusion.serving.server import run_until_stopped

class Slow(toys.ToyModel):
    def denoiser(self, tokens_BT, *, key_mask_BT):
        time.sleep(0.02)
        return super().denoiser(tokens_BT, key_mask_BT=key_mask_BT)

listening = socket.create_server(("127.0.0.1", 0))
limits = ServerLimits(shutdown_seconds=float(sys.argv[2]))
run_until_stopped(ServedModel(Slow(), "slow"), limits, None, listening, "127.0.0.1")
"""


@pytest.fixture
def process(tmp_path, kit):
    """Starts a process; it and its address."""
    started = []

    def start(shutdown_seconds):
        log = tmp_path / "log"
        command = [sys.executable, "-c", SCRIPT, str(Path(__file__).with_name("conftest.py")), str(shutdown_seconds)]
        with log.open("w") as file:
            server = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"PYTHONWARNINGS": "ignore"})
        started.append(server)

        def address():
            assert server.poll() is None, log.read_text()[-3000:]
            return re.search(r"serving slow at (\S+)", log.read_text())

        kit.until(address, seconds=300)
        return server, address()[1], log

    yield start
    for server in started:
        server.kill()
        server.wait()


def stream(url, length):
    body = {"prompt": "a", "max_tokens": length, "stream": True, "block_size": 2, "stop_at_eos": False}
    return httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300)


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_what_runs_is_finished_when_the_process_is_told_to_stop(process, told):
    server, url, log = process(200)
    with stream(url, 60) as response:
        parts = response.iter_text()
        text = next(parts)
        server.send_signal(told)
        text += "".join(parts)
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]" and json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.wait(300) == 0
    assert len(log.read_text().splitlines()) == 1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_what_waits_is_answered_when_the_process_is_told_to_stop(kit, process):
    server, url, _ = process(200)

    def ask(index):
        body = {"prompt": "a", "max_tokens": 20, "n": 2, "remasking": ("margin", "confidence")[index % 2]}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=300)

    def have_come():
        return "nemo_dllm_prompt_tokens_total 20.0" in httpx.get(f"{url}/metrics", timeout=300).text

    with ThreadPoolExecutor(20) as clients:
        answers = [clients.submit(ask, index) for index in range(20)]
        kit.until(have_come)
        server.send_signal(signal.SIGTERM)
        assert [len(answer.result(300).json()["choices"]) for answer in answers] == [2] * 20
    assert server.wait(300) == 0


def test_what_takes_longer_than_its_time_is_cut_off(process):
    server, url, _ = process(1)
    with stream(url, 500) as response:
        parts = response.iter_text()
        next(parts)
        server.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            for _ in parts:
                pass
    assert server.wait(300) == 0


def test_garbage_is_not_looked_for_in_what_is_loaded(kit, monkeypatch):
    """A body of many small lists starts collections, and with NeMo in the process each takes seconds."""
    frozen, told = [], signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: frozen.append(gc.get_freeze_count()))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            run_until_stopped(ServedModel(kit.ToyModel(), "toy"), ServerLimits(), None, listening, "127.0.0.1")
    finally:
        gc.unfreeze()
        signal.signal(signal.SIGTERM, told)
    assert frozen[0] > 0.9 * len(gc.get_objects())


def test_a_server_says_that_it_is_loading(kit):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = "http://{}:{}".format(*listening.getsockname())
        with answering_while_loading(listening):
            health = httpx.get(f"{url}/health", timeout=60)
            assert (health.status_code, health.json()["status"]) == (503, "loading")
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
            assert int(answer.headers["retry-after"]) > 0
        # Whoever comes now waits for the next one to listen.
        with socket.create_connection(listening.getsockname()) as waiting, answering_while_loading(listening):
            waiting.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            waiting.settimeout(60)
            assert waiting.recv(100).startswith(b"HTTP/1.1 503")
