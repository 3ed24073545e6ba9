"""A server process for a checkpoint, and OpenAI's client."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from nemo_dllm.collections.diffusion.sampling import generate

pytestmark = pytest.mark.nemo

MODELS = Path(__file__).parents[1] / "golden" / "models"
TEMPLATE = "{% for m in messages %}<|im_start|> {{ m.content }} <|im_end|> {% endfor %}<|im_start|>"


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """The server's process, which writes to the file ``process.log``."""
    folder = tmp_path_factory.mktemp("serving")
    (folder / "template.jinja").write_text(TEMPLATE)
    arguments = ["serve", MODELS / "a2d_qwen3", "--port", 0, "--name", "tiny", "--threshold", 0.9]
    arguments += ["--chat-template", folder / "template.jinja"]
    command = [sys.executable, "-m", "nemo_dllm.cli", *map(str, arguments)]
    environment = os.environ | {"NEMO_DLLM_API_KEY": "sesame"}
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process,
    ):
        process.log = folder / "log"
        yield process
        if process.poll() is None:
            process.kill()


@pytest.fixture(scope="module")
def client(process, kit):
    def address():
        assert process.poll() is None, process.log.read_text()[-3000:]
        return re.search(r"serving tiny at (\S+)", process.log.read_text())

    kit.until(address, seconds=120)
    return openai.OpenAI(base_url=f"{address()[1]}/v1", api_key="sesame", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def model(process, single_process):
    """The same checkpoint in this process, loaded while the server's starts."""
    from nemo_dllm.collections.diffusion.inference import load_checkpoint

    return load_checkpoint(MODELS / "a2d_qwen3")


def expected(model, ids, seed=0, **settings):
    config = model.sampler_config(threshold=0.9, **settings)
    result = generate(model.denoiser, [ids], config, mask_token_id=model.mask_token_id, seeds=[seed])
    return model.decode(result.sequences[0].tolist()), result


def test_completions_are_the_samplers(model, client):
    given = {"temperature": 1.0, "max_tokens": 12}
    answer = client.completions.create(model="tiny", prompt="w5 w7", seed=3, **given)
    text, result = expected(model, [5, 7], 3, temperature=1.0, max_new_tokens=12)
    # White space between the two belongs to the completion.
    assert "w5 w7" + answer.choices[0].text == text
    assert answer.usage.completion_tokens == len(result.completions[0])
    assert answer.choices[0].finish_reason == result.finish_reasons[0]
    stream = client.completions.create(model="tiny", prompt="w5 w7", seed=3, stream=True, **given)
    assert "w5 w7" + "".join(chunk.choices[0].text for chunk in stream) == text


def test_caches_of_the_model(model, client):
    settings = {"cache": "approximate_dual", "block_size": 4}
    answer = client.completions.create(model="tiny", prompt="w5 w7", max_tokens=12, extra_body=settings)
    assert "w5 w7" + answer.choices[0].text == expected(model, [5, 7], max_new_tokens=12, **settings)[0]
    with pytest.raises(openai.UnprocessableEntityError) as error:
        client.completions.create(model="tiny", prompt="w5", extra_body=settings | {"cache": "exact"})
    assert error.value.param == "cache"


def test_conversations_go_through_the_template(model, client):
    turns = [{"role": "user", "content": "w5 w7"}]
    answer = client.chat.completions.create(model="tiny", messages=turns, max_tokens=10)
    prompt = [193, 5, 7, 192, 193]
    _, result = expected(model, prompt, max_new_tokens=10)
    assert answer.choices[0].message.content == model.decode(result.completions[0].tolist())
    assert answer.usage.prompt_tokens == len(prompt)


def test_a_batch_on_a_block_causal_model_is_its_rows_alone(single_process, kit):
    from nemo_dllm.collections.diffusion.inference import load_checkpoint

    loaded = load_checkpoint(MODELS / "sdar")
    prompts = [[5], [7, 9, 3, 4, 8, 6], [11] * 9, [2, 3]]
    with kit.running(loaded) as server:
        body = {"prompt": prompts, "max_tokens": 11, "stop_at_eos": False}
        batch = [choice["text"] for choice in server.post("/v1/completions", body).json()["choices"]]
        alone = [server.post("/v1/completions", body | {"prompt": ids}).json()["choices"][0]["text"] for ids in prompts]
        assert server.metric("batch_rows_sum") > server.metric("batch_rows_count") + 20
        other = server.post("/v1/completions", body | {"block_size": 8})
    assert batch == alone
    # As on the command line: it would see blocks that it has never seen.
    assert (other.status_code, other.json()["error"]["param"]) == (422, "block_size")
    assert "block_size=8 is not the 4 that this block-causal model has learnt" in other.json()["error"]["message"]
    config = loaded.sampler_config(max_new_tokens=11, stop_at_eos=False)
    assert config.cache == "exact"
    result = generate(loaded.denoiser, [prompts[1]], config, mask_token_id=loaded.mask_token_id)
    assert loaded.decode(result.sequences[0].tolist()) == loaded.decode(prompts[1]) + batch[1]


def test_an_interrupt_ends_the_process(process, client):
    assert client.models.list().data[0].id == "tiny"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert process.log.read_text().splitlines()[1:] == []
