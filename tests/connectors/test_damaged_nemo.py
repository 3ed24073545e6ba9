"""NeMo checkpoints that were copied in part, or cut off: named in one line, and no export of them."""

import shutil

import pytest

pytestmark = pytest.mark.nemo


@pytest.fixture(scope="module")
def imported(single_process, models, tmp_path_factory):
    from nemo_dllm.connectors.conversion import import_checkpoint

    return import_checkpoint(models / "qwen3", tmp_path_factory.mktemp("imported") / "nemo")


def cut(*files):
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE = {
    "no weights": ("weights", lambda folder: shutil.rmtree(folder / "weights")),
    "no index of weights": ("weights", lambda folder: (folder / "weights" / ".metadata").unlink()),
    "half an index of weights": ("weights", lambda folder: cut(folder / "weights" / ".metadata")),
    "no kind of checkpoint": ("weights", lambda folder: (folder / "weights" / "metadata.json").unlink()),
    "half the weights": ("weights", lambda folder: cut(*(folder / "weights").glob("*.distcp"))),
    "half the common state": ("weights", lambda folder: cut(folder / "weights" / "common.pt")),
    "no context": ("context", lambda folder: (folder / "context" / "io.json").unlink()),
    "half a context": ("context", lambda folder: cut(folder / "context" / "io.json")),
    "half the facts": ("context/hf/nemo_dllm.json", lambda folder: cut(folder / "context/hf/nemo_dllm.json")),
    "no config.json": ("context/hf/config.json", lambda folder: (folder / "context/hf/config.json").unlink()),
    "half a layout": (
        "context/hf/nemo_dllm_shards.json",
        lambda folder: cut(folder / "context/hf/nemo_dllm_shards.json"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_named(imported, tmp_path, damage):
    from nemo_dllm.cli.errors import is_for_users
    from nemo_dllm.connectors.hf_export import export_hf_checkpoint

    place, harm = DAMAGE[damage]
    twin = shutil.copytree(imported, tmp_path / "nemo")
    harm(twin)
    with pytest.raises((ValueError, FileNotFoundError), match="incomplete|is no valid JSON") as error:
        export_hf_checkpoint(twin, tmp_path / "hf")
    assert str(twin / place) in str(error.value) and "\n" not in str(error.value)
    assert is_for_users(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["nemo"]


def test_facts_of_another_version(imported, tmp_path):
    from nemo_dllm.connectors.hf_export import export_hf_checkpoint

    twin = shutil.copytree(imported, tmp_path / "nemo")
    (twin / "context" / "hf" / "nemo_dllm.json").write_text('{"family": "qwen3", "later": 1}')
    with pytest.raises(
        ValueError, match=r"facts of the checkpoint are not of this version \(.*'later'\); import it again"
    ):
        export_hf_checkpoint(twin, tmp_path / "hf")
