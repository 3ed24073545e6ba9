"""The page: what it is made of, and in a headless Chromium."""

import json
import re
import shutil
import subprocess

import httpx
import pytest
from fastapi import Request

from nemo_dllm.collections.diffusion.serving.app import PAGE


def test_the_page_asks_nobody_else(server):
    response = httpx.get(server.url)
    assert response.headers["content-type"].startswith("text/html")
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    assert re.findall(r"(?:src|href)=\"(?!data:)|https?://|@import|url\(", response.text) == []


def test_the_page_finds_all_that_it_names():
    text = PAGE.read_text()
    ids = set(re.findall(r'id="(\w+)"', text))
    named = set(re.findall(r'\$\("(\w+)"\)', text)) | set(json.loads(re.search(r"of (\[.*?\])\)\n", text)[1]))
    assert named <= ids and len(named) > 10


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_is_one(tmp_path):
    (tmp_path / "page.js").write_text(re.search(r"<script>(.*)</script>", PAGE.read_text(), re.DOTALL)[1])
    subprocess.run(["node", "--check", tmp_path / "page.js"], check=True)


DRIVE = """
const fill = (id, value) => { document.getElementById(id).value = value; };
const frames = [];
const masks = () => [...document.querySelectorAll("#canvas .mask")].map((span) => span.textContent).join("").length;
new MutationObserver(() => frames.push(masks())).observe(document.getElementById("canvas"), {childList: true});
const pause = () => new Promise((r) => setTimeout(r, 25));
const wait = async (holds) => { for (let i = 0; i < 400 && !holds(); i++) await pause(); };
(async () => {
  await wait(() => document.getElementById("model").textContent);
  fill("prompt", "hello"); fill("max_tokens", "12"); fill("seed", "3");
  document.querySelector("[name=block_size]").value = "4";
  document.getElementById("go").click();
  await wait(() => document.getElementById("status").textContent.startsWith("done"));
  const status = document.getElementById("status").textContent;
  const text = document.getElementById("canvas").textContent;
  fetch("report", {method: "POST", body: JSON.stringify({status, frames, text})});
})();
"""


@pytest.mark.browser
def test_the_page_shows_the_denoising(kit, tmp_path, monkeypatch):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("there is no Chromium on the path")
    page = tmp_path / "page.html"
    page.write_text(PAGE.read_text().replace("loadSettings();\n</script>", f"loadSettings();\n{DRIVE}</script>"))
    monkeypatch.setattr("nemo_dllm.collections.diffusion.serving.app.PAGE", page)
    reports = []

    async def report(request: Request) -> None:
        reports.append(await request.json())

    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    with kit.running(kit.ToyModel()) as server:
        server.app.post("/report")(report)
        given = {"prompt": "hello", "max_tokens": 12, "seed": 3, "block_size": 4}
        text = server.post("/v1/completions", given).json()["choices"][0]["text"]
        with subprocess.Popen([browser, *options, server.url], stderr=subprocess.DEVNULL) as process:
            kit.until(lambda: reports or process.poll() is not None, seconds=60)
            process.terminate()
    (shown,) = reports
    assert shown["status"] == "done after 12 steps (length)" and shown["text"] == text
    # Holes vanish step by step, or several at once where the browser draws less often.
    assert shown["frames"] == sorted(shown["frames"], reverse=True) and len(shown["frames"]) > 3
