"""The page on serving says what the code does."""

import re
from dataclasses import fields
from pathlib import Path

from nemo_dllm.collections.diffusion.serving.limits import ServerLimits

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


def test_the_clients_of_the_page_run(server, capsys):
    # One goes on where the one before it ends.
    script = (
        "".join(re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL))
        .replace("http://127.0.0.1:8000", server.url)
        .replace("mdlm_tiny", "toy")
    )
    names = {}
    exec(compile(script, "docs/serving.md", "exec"), names)
    assert names["answer"].usage.completion_tokens == 32 and names["between"].choices[0].text
    assert len(capsys.readouterr().out) > 60


def test_every_limit_has_its_row_with_its_default():
    rows = [f"| `{field.name}` | `{field.default!r}` |" for field in fields(ServerLimits)]
    assert [row for row in rows if row not in PAGE] == []


def test_every_path_is_named(server):
    paths = {route.path.replace("{name:path}", "NAME") for route in server.app.routes}
    assert [path for path in paths if f"{path}`" not in PAGE] == []
