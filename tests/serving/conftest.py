"""Models and servers for the tests of serving.

Clients and web servers are imported where a server is started: tests of the engine run without them.

Shape letters: B rows, T canvas positions.
"""

import json
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import SamplerConfig, preset_fields
from nemo_dllm.collections.diffusion.serving import ServedModel, ServerLimits

# Ids 0 to 255 are bytes.
MASK, EOS, TURN = 256, 257, 258
SPECIAL = {MASK: "<mask>", EOS: "<eos>", TURN: "<turn>"}
VOCABULARY = 259

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system turn comes first') }}{% endif %}{{ m.role }}: {{ m.content }}<turn>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class ByteTokenizer:
    """Bytes and three special tokens, with the methods of a Hugging Face tokenizer that serving calls."""

    chat_template = TEMPLATE
    added_tokens_decoder = {
        id: type("Token", (), {"special": True, "__str__": lambda self, text=text: text})()
        for id, text in SPECIAL.items()
    }

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": self.encode(text)}

    def encode(self, text):
        ids = []
        while text:
            special = next((id for id, name in SPECIAL.items() if text.startswith(name)), None)
            ids += list(text[0].encode()) if special is None else [special]
            text = text[1 if special is None else len(SPECIAL[special]) :]
        return ids

    def decode(self, ids):
        return bytes(id for id in ids if id < 256).decode(errors="replace")

    def apply_chat_template(self, messages, *, chat_template, tokenize, **variables):
        from transformers.utils.chat_template_utils import render_jinja_template

        assert not tokenize
        variables.setdefault("add_generation_prompt", False)
        texts, _ = render_jinja_template([messages], chat_template=chat_template or self.chat_template, **variables)
        return texts[0]


class ToyModel:
    """A ``TextModel``: random logits from every visible token and its distance, in float64, so that batching changes
    nothing; ``answer`` makes it say a text instead, ``hold`` makes passes wait.

    ``batches`` keeps the shape of every pass.
    """

    tokenizer = ByteTokenizer()
    mask_token_id = MASK
    device = torch.device("cpu")

    def __init__(self, answer=None, seq_length=512):
        generator = torch.Generator().manual_seed(0)
        self.embedding_VV = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
        self.embedding_VV[:, 128:] -= 100.0
        self.answer, self.seq_length = answer, seq_length
        self.batches = []
        self.open = threading.Event()
        self.open.set()
        self.fail_on, self.error = None, RuntimeError("the model broke")

    def denoiser(self, tokens_BT, *, key_mask_BT):
        self.batches.append(tuple(tokens_BT.shape))
        self.open.wait(300)
        if self.fail_on is not None and (tokens_BT == self.fail_on).any():
            raise self.error
        if self.answer is not None:
            return self._say(tokens_BT)
        values_BTV = self.embedding_VV[tokens_BT]
        if key_mask_BT is not None:
            values_BTV = values_BTV * key_mask_BT[..., None]
        positions_T = torch.arange(tokens_BT.shape[1], dtype=torch.float64)
        return (torch.cos(1.7 * (positions_T[:, None] - positions_T)) + 0.3) @ values_BTV

    def _say(self, tokens_BT):
        """The answer behind the bar that ends the prompt, the surer the further left."""
        logits_BTV = torch.zeros(*tokens_BT.shape, VOCABULARY)
        for row, tokens in enumerate(tokens_BT.tolist()):
            start = tokens.index(ord("|")) + 1 if ord("|") in tokens else 0
            for index, position in enumerate(range(start, len(tokens))):
                token = self.answer[index] if index < len(self.answer) else EOS
                logits_BTV[row, position, token] = 20.0 - 0.01 * position
        return logits_BTV

    def encode(self, text):
        return self.tokenizer.encode(text)

    def decode(self, ids):
        return self.tokenizer.decode(ids)

    def sampler_config(self, preset=None, **settings):
        of_checkpoint = {"eos_token_id": EOS}
        return SamplerConfig(**((preset_fields(preset) if preset else {}) | of_checkpoint | settings))


class RunningServer:
    """A server in a thread of its own, with clients for it."""

    def __init__(self, model, limits=None, api_key=None, **options):
        import uvicorn

        from nemo_dllm.collections.diffusion.serving import create_app

        self.model = model
        served = ServedModel(model, "toy", **options)
        if isinstance(model, ToyModel):
            model.batches.clear()
        self.app = create_app(served, limits or ServerLimits(), api_key=api_key)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(self.app, log_config=None, timeout_graceful_shutdown=5))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self.socket]})

    def start(self):
        self._thread.start()
        until(lambda: self._server.started)
        return self

    def stop(self):
        if isinstance(self.model, ToyModel):
            self.model.open.set()
        self._server.should_exit = True
        self._thread.join(300)
        assert not self._thread.is_alive()

    def client(self, key="none", **options):
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": 300} | options)

    def post(self, path, body, **options):
        import httpx

        return httpx.post(f"{self.url}{path}", json=body, timeout=300, **options)

    def events(self, path, body):
        """The data of every event of a stream, the last one's "[DONE]" left out."""
        response = self.post(path, {**body, "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert data.pop() == "[DONE]"
        return [json.loads(event) for event in data]

    def get(self, path):
        import httpx

        return httpx.get(f"{self.url}{path}", timeout=300)

    def health(self):
        return self.get("/health").json()

    def row_ends(self):
        """How many choices have ended how."""
        from prometheus_client.parser import text_string_to_metric_families

        text = self.get("/metrics").text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        return {
            sample.labels["finish_reason"]: int(sample.value)
            for sample in families["nemo_dllm_rows"].samples
            if sample.name.endswith("_total") and sample.value
        }

    def metric(self, name):
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(f"nemo_dllm_{name} "):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")


def until(holds, seconds=300.0):
    """Wait for something that other threads bring about."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


@contextmanager
def _running(*arguments, **options):
    server = RunningServer(*arguments, **options).start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def passes_begin_ahead(monkeypatch):
    """As on a GPU: the order in which more can go wrong."""
    monkeypatch.setattr("nemo_dllm.collections.diffusion.serving.rolling.works_apart", lambda device: True)


@pytest.fixture(scope="session")
def kit():
    """The toys, for tests, which cannot import this file."""
    ids = {"MASK": MASK, "EOS": EOS, "TURN": TURN, "VOCABULARY": VOCABULARY}
    return SimpleNamespace(running=_running, until=until, ToyModel=ToyModel, **ids)


@pytest.fixture(scope="module")
def server(kit):
    """A server of the toy with random logits."""
    with kit.running(kit.ToyModel()) as running:
        yield running
