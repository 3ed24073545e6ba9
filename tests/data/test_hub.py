"""Names are looked for at the Hub once: a server that hangs up stands for it, in a process of its own."""

import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from nemo_dllm.collections.diffusion.data.sources import find_sources
from nemo_dllm.collections.diffusion.data.tokenizer import byte_tokenizer, load_tokenizer

TOKENIZER = (
    "from nemo_dllm.collections.diffusion.data.tokenizer import load_tokenizer\nprint(len(load_tokenizer('{}')))"
)
NEMO_TOKENIZER = """
from nemo_dllm.console import import_nemo_quietly
import_nemo_quietly()
from nemo_dllm.collections.diffusion.data.tokenizer import load_nemo_tokenizer
print(load_nemo_tokenizer('{}').vocab_size)
"""
DATASET = "from nemo_dllm.collections.diffusion.data.sources import find_sources\nprint(find_sources(['hf://{}']))"
# It tells what the libraries found of it afterwards.
AFTERWARDS = "\nfrom huggingface_hub import constants\nprint(constants.HF_HUB_OFFLINE)"


@contextmanager
def silent_hub():
    """The address of a server that takes calls and says nothing, and the list of its calls."""
    calls = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                calls.append(connection.recv(4096).split(b" ", 2)[:2])
                connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", calls
        server.shutdown(socket.SHUT_RDWR)


def ask(code, tmp_path):
    """What a program says that finds no answer at the Hub, and what it has asked there."""
    with silent_hub() as (address, calls):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        command = [sys.executable, "-c", code + AFTERWARDS]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    return done, calls


@pytest.mark.parametrize(
    "code, error",
    [
        (TOKENIZER, "tokenizer='owner/nosuch' is neither a folder with tokenizer.json nor could it be fetched"),
        pytest.param(NEMO_TOKENIZER, "tokenizer='owner/nosuch' is neither a folder", marks=pytest.mark.nemo),
        (DATASET, "the dataset 'owner/nosuch' is no folder, and could not be had from the Hugging Face Hub"),
    ],
)
def test_a_hub_that_does_not_answer_is_asked_once(tmp_path, code, error):
    done, calls = ask(code.format("owner/nosuch"), tmp_path)
    assert f"FileNotFoundError: {error}" in done.stderr
    kind = "datasets" if code is DATASET else "models"
    assert calls == [[b"GET", f"/api/{kind}/owner/nosuch".encode()]]


@pytest.mark.parametrize("code", [TOKENIZER, pytest.param(NEMO_TOKENIZER, marks=pytest.mark.nemo)])
def test_what_the_cache_has_needs_no_answer(tmp_path, code):
    kept = tmp_path / "hub" / "models--owner--name"
    (kept / "snapshots").mkdir(parents=True)
    byte_tokenizer(kept / "snapshots" / ("0" * 40))
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    done, calls = ask(code.format("owner/name"), tmp_path)
    # Whoever asks for something else later may find the Hub again.
    assert done.stdout.split()[-2:] == ["258", "False"], done.stderr
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["a/b/c", "/nosuch", "./nosuch", "~/nosuch", "no such", "-a/b"])
def test_what_is_no_name_of_the_hub_is_told_without_it(monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(FileNotFoundError, match=f"^tokenizer='{name}' does not exist; name a folder with tokenizer.js"):
        load_tokenizer(name)


def test_a_file_is_no_tokenizer(tmp_path):
    file = byte_tokenizer(tmp_path / "byte") / "tokenizer.json"
    with pytest.raises(NotADirectoryError, match=r"tokenizer.json' is a file; name the folder that it lies in$"):
        load_tokenizer(file)


def test_a_wrong_name_of_a_dataset_is_told(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="the dataset 'a/b/c' is no folder, and could not be had"):
        find_sources(["hf://a/b/c"])
