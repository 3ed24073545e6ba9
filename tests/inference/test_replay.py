import json
import re

import pytest
import torch

pytestmark = pytest.mark.nemo


def step(number, tokens, holes, new):
    from nemo_dllm.collections.diffusion.sampling import DenoiseStep

    return DenoiseStep(torch.tensor([tokens]), torch.tensor([holes]), torch.tensor([new]), number)


def frames_of(page):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def test_a_page_holds_every_step(tmp_path, capsys):
    from nemo_dllm.collections.diffusion.inference.replay import Replay

    replay = Replay(tmp_path / "replay.html", title="a question")
    replay.write()
    assert not replay.path.exists() and capsys.readouterr().err == ""
    words = ["a", "</script><b>", "\x1b"]

    def decode(ids):
        return "".join(words[token] for token in ids)

    replay.add(step(1, [0, 9, 9], [False, True, True], [True, False, False]), decode)
    replay.add(step(2, [0, 1, 2], [False, False, False], [False, True, True]), decode)
    replay.write()
    assert capsys.readouterr().err == f"replay: {tmp_path / 'replay.html'}\n"
    page = replay.path.read_text()
    assert page.count("</script>") == 2
    assert frames_of(page) == [
        {"title": "a question", "caption": "step 1, 2 masked", "pieces": [["a", "new"], ["░░", "mask"]]},
        {"title": "a question", "caption": "step 2, 0 masked", "pieces": [["a", "old"], ["</script><b>␛", "new"]]},
    ]


@pytest.mark.parametrize("name", ["replay.html", "replay.gif"])
def test_an_old_replay_stays_until_the_new_one_is_whole(tmp_path, name):
    from nemo_dllm.collections.diffusion.inference.replay import Replay

    replay = Replay(tmp_path / name)
    replay.path.write_text("old")
    replay.add(step(1, [0], [False], [True]), lambda ids: "a")
    # Half of a pair of surrogates, which no file holds; a picture fails by its caption.
    replay._frames[0] |= {"title": "\ud800", "caption": None}
    with pytest.raises((UnicodeEncodeError, TypeError, AttributeError)):
        replay.write()
    assert replay.path.read_text() == "old"
    replay._frames[0] |= {"title": "", "caption": "step 1"}
    replay.write()
    assert replay.path.read_bytes()[:6] in (b"<!doct", b"GIF89a") and [file.name for file in tmp_path.iterdir()] == [
        name
    ]
