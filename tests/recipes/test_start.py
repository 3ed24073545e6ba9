"""Training from a Hugging Face folder is training from its import, without the import."""

import json
import runpy
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.nemo

MODELS = Path(__file__).parents[1] / "golden" / "models"
TABLE = "model.embed_tokens.weight"
STEPS = 2


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """An autoregressive checkpoint without room for a mask token."""
    folder = shutil.copytree(MODELS / "qwen3_tied", tmp_path_factory.mktemp("source") / "source")
    tensors = load_file(folder / "model.safetensors")
    tensors[TABLE] = tensors[TABLE][:196].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 196}))
    return folder


@pytest.fixture(scope="module")
def imported(source, tmp_path_factory, single_process):
    from nemo_dllm.collections.diffusion.models.a2d import A2DModel
    from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
    from nemo_dllm.connectors.config import hf_to_nemo_config
    from nemo_dllm.connectors.hf_import import import_hf_checkpoint

    model = A2DModel(hf_to_nemo_config(source), MaskedDiffusion())
    return import_hf_checkpoint(model, source, tmp_path_factory.mktemp("imported") / "nemo")


@pytest.fixture(scope="module")
def train(forks, source, tmp_path_factory):
    """What each rank keeps of a training from ``init_from``, and its folder."""
    script = Path(__file__).with_name("start_jobs.py")

    def run(init_from, ranks=1, layout=None, steps=STEPS, folder=None, fails=False, **settings):
        folder = folder or tmp_path_factory.mktemp("run")
        job = {
            "folder": folder,
            "ranks": ranks,
            "source": source if source.exists() else init_from,
            "init_from": init_from,
            "layout": layout or {},
            "steps": steps,
            **settings,
        }
        processes = [
            forks.Process(target=runpy.run_path, args=(str(script), {"job": job | {"rank": rank}}, "__main__"))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=300)
            if process.is_alive():
                process.kill()
        assert [process.exitcode for process in processes] == [int(fails)] * ranks
        return [torch.load(folder / f"kept{steps}.{rank}") for rank in range(0 if fails else ranks)], folder

    return run


def assert_equal(left, right):
    assert torch.equal(left["losses"], right["losses"])
    assert left["weights"].keys() == right["weights"].keys()
    assert all(torch.equal(left["weights"][name], right["weights"][name]) for name in left["weights"])


@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_from_the_folder_is_from_its_import_bit_for_bit(train, source, imported, precision):
    (folder,), _ = train(source, precision=precision)
    (from_import,), _ = train(imported, precision=precision)
    assert_equal(folder, from_import)
    assert (folder["vocab_size"], folder["mask_token_id"]) == (197, 196)


@pytest.mark.parametrize("layout", [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}])
def test_every_layout_starts_from_the_same_weights(train, source, imported, layout):
    alone, _ = train(source)
    ranks, _ = train(source, ranks=2, layout=layout)
    torch.testing.assert_close(ranks[-1]["losses"], alone[0]["losses"], rtol=1e-5, atol=0)
    for rank, from_import in zip(ranks, train(imported, ranks=2, layout=layout)[0], strict=True):
        assert_equal(rank, from_import)


def test_a_run_goes_on_from_its_own_checkpoint_and_exports(train, source, tmp_path):
    """The second process finds neither the folder nor anything but what the run kept."""
    (straight,), _ = train(source, steps=2 * STEPS)
    gone = shutil.copytree(source, tmp_path / "gone")
    _, folder = train(gone, save=True)
    shutil.rmtree(gone)
    (resumed,), _ = train(gone, steps=2 * STEPS, folder=folder, save=True)
    assert torch.equal(resumed["losses"], straight["losses"][STEPS:])

    from nemo_dllm.collections.diffusion.training.checkpoints import latest_checkpoint
    from nemo_dllm.connectors.hf_export import export_hf_checkpoint

    last = latest_checkpoint(folder / "log" / "run" / "checkpoints")
    exported = export_hf_checkpoint(last, tmp_path / "exported")
    config = json.loads((exported / "config.json").read_text())
    assert (config["vocab_size"], config["mask_token_id"], config["model_type"]) == (197, 196, "a2d-qwen3")
    assert "<|mask|>" in (exported / "tokenizer.json").read_text()


@pytest.fixture(scope="module")
def adapted(train, source, tmp_path_factory):
    """Adapters trained on two tensor-parallel ranks from the folder: what the ranks keep, and the run's folder."""
    return train(source, ranks=2, layout={"tensor_model_parallel_size": 2}, save=True, adapters=True)


def test_every_rank_learns_that_the_base_model_could_not_be_made(train, source, tmp_path):
    """None waits for it any longer, and a second try is a new one."""
    damaged = shutil.copytree(source, tmp_path / "damaged")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    run = {"ranks": 2, "layout": {"tensor_model_parallel_size": 2}, "adapters": True, "folder": tmp_path}
    train(damaged, fails=True, **run)
    reasons = [(tmp_path / f"error{rank}").read_text() for rank in range(2)]
    assert "could not be converted" in reasons[0] and "model.norm.weight holds NaN" in reasons[0]
    assert reasons[0] == reasons[1]
    shutil.copy(source / "model.safetensors", damaged)
    (tmp_path / f"store{STEPS}").unlink()
    assert len(train(damaged, **run)[0]) == 2


def last_checkpoint(folder):
    from nemo_dllm.collections.diffusion.training.checkpoints import latest_checkpoint

    return latest_checkpoint(folder / "log" / "run" / "checkpoints")


def change(ranks, layer, scale=2.0):
    """Of a fused weight, by hand from the parts of all ranks: column-parallel layers split B, row-parallel ones A."""
    a, b = (
        [
            weight
            for rank in ranks
            for name, weight in rank["weights"].items()
            if name.endswith(f"{layer}.adapter.{part}")
        ]
        for part in ("linear_in.weight", "linear_out.weight")
    )
    a = torch.cat(a, 1 if layer.endswith(("linear_proj", "linear_fc2")) else 0)
    if layer.endswith("linear_fc1"):  # Each rank has its gates, then what they gate.
        gates, ups = zip(*(part.chunk(2) for part in b), strict=True)
        b = [*gates, *ups]
    return scale * torch.cat(b) @ a


def test_adapters_are_merged_on_export(adapted, source, single_process, tmp_path):
    from nemo_dllm.connectors.hf_export import export_hf_checkpoint

    ranks, folder = adapted
    moved = (folder / "log").rename(tmp_path / "log")
    exported = export_hf_checkpoint(last_checkpoint(tmp_path), tmp_path / "exported")
    moved.rename(folder / "log")
    before, after = (load_file(path / "model.safetensors") for path in (source, exported))
    assert before.keys() == after.keys()
    assert torch.equal(after[TABLE][:196], before[TABLE])
    changed = {name for name in before if name != TABLE and (before[name] != after[name]).any()}
    assert changed == {name for name in before if "_proj." in name}
    for layer in range(2):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        expected = {
            "self_attn.o_proj": change(ranks, f"{ours}self_attention.linear_proj"),
            "mlp.down_proj": change(ranks, f"{ours}mlp.linear_fc2"),
            **zip_chunks(("mlp.gate_proj", "mlp.up_proj"), change(ranks, f"{ours}mlp.linear_fc1")),
        }
        for name, difference in expected.items():
            name = f"{theirs}{name}.weight"
            assert difference.abs().max() > 1e-4
            torch.testing.assert_close(after[name] - before[name], difference, rtol=0, atol=1e-6)


def zip_chunks(names, tensor):
    return dict(zip(names, tensor.chunk(len(names)), strict=True))


def test_adapters_merged_are_adapters_applied(adapted, single_process, monkeypatch):
    from nemo_dllm.connectors import hf_export

    last = last_checkpoint(adapted[1])
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        merged = hf_export.load_nemo_checkpoint(last).module.eval()(tokens)
        monkeypatch.setattr(hf_export, "merge_adapters", lambda core: None)
        applied = hf_export.load_nemo_checkpoint(last).module.eval()(tokens)
        monkeypatch.setattr(hf_export, "add_adapters", lambda core, lora: None)
        monkeypatch.setattr(hf_export, "_ADAPTER", "no name has this")
        base = hf_export.load_nemo_checkpoint(last).module.eval()(tokens)
    assert (merged - applied).abs().max() < 2e-5 < 0.1 < (merged - base).abs().max()


def test_adapters_start_alike_from_a_folder_and_from_its_import(train, source, imported):
    (from_folder,), _ = train(source, adapters=True)
    (from_import,), _ = train(imported, adapters=True)
    assert_equal(from_folder, from_import)


def test_adapters_go_on_where_they_were_without_the_folder(train, source, tmp_path):
    (straight,), _ = train(source, steps=2 * STEPS, adapters=True)
    gone = shutil.copytree(source, tmp_path / "gone")
    _, folder = train(gone, save=True, adapters=True)
    shutil.rmtree(gone)
    moved = folder.rename(tmp_path / "moved")
    (resumed,), _ = train(gone, steps=2 * STEPS, folder=moved, save=True, adapters=True)
    assert torch.equal(resumed["losses"], straight["losses"][STEPS:])


def test_a_killed_import_leaves_nothing_that_loads(forks, source, single_process, tmp_path):
    from nemo_dllm.connectors.conversion import import_checkpoint
    from nemo_dllm.connectors.hf_export import load_nemo_checkpoint

    script = Path(__file__).with_name("killed_import.py")
    job = (source, tmp_path / "nemo")
    process = forks.Process(target=runpy.run_path, args=(str(script), {"job": job}, "__main__"))
    process.start()
    process.join(timeout=300)
    assert process.exitcode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".nemo.unfinished") and (left / "weights" / ".metadata").is_file()
    with pytest.raises(ValueError, match="is a conversion that did not end; convert again, which removes it"):
        load_nemo_checkpoint(left)
    assert load_nemo_checkpoint(import_checkpoint(*job)).config.vocab_size == 197
    assert [path.name for path in tmp_path.iterdir()] == ["nemo"]


@pytest.mark.parametrize("task", ["pretrain", "finetune"])
def test_a_start_that_is_not_there_is_told_before_all_else(task, tiny, monkeypatch, tmp_path):
    """Before the memory that the run would take, too; a run that may go on by itself does not need it."""
    import fiddle as fdl

    from nemo_dllm.recipes import tasks

    monkeypatch.chdir(tmp_path)
    tiny.trainer.max_steps = 0
    start = {field: fdl.build(getattr(tiny, field)) for field in ("model", "data", "trainer", "log", "resume")}
    with pytest.raises(FileNotFoundError, match="^init_from=nosuch is no folder that is there"):
        getattr(tasks, task)(**start, init_from="nosuch")
    (tmp_path / "nemo_experiments" / "mdlm_tiny" / "start").mkdir(parents=True)
    with pytest.raises(ValueError, match="trainer.max_steps=0 must be"):
        getattr(tasks, task)(**start, init_from="nosuch")


def test_a_trained_model_of_other_sizes_is_told_before_its_mask_token(imported, tmp_path):
    """Of a NeMo checkpoint that is no import, which a folder without the files of Hugging Face is."""
    from nemo_dllm.collections.diffusion.data.mock_datamodule import MockDataModule
    from nemo_dllm.connectors.conversion import diffusion_model
    from nemo_dllm.recipes.start import StartFrom

    trained = shutil.copytree(imported, tmp_path / "trained")
    (trained / "context" / "hf" / "nemo_dllm.json").unlink()
    model = diffusion_model(MODELS / "qwen3_tied", "a2d", mask_token_id=17)
    model.config.num_layers = 7
    with pytest.raises(ValueError, match="trained is another model's: num_layers=2 there, 7 here"):
        StartFrom(init_from=str(trained), data=MockDataModule(vocab_size=196)).setup(None, model)


def test_an_import_of_other_sizes_names_a_way_out(imported, recipes):
    import fiddle as fdl

    from nemo_dllm.collections.diffusion.data.mock_datamodule import MockDataModule
    from nemo_dllm.recipes.start import StartFrom

    model = fdl.build(recipes["qwen3_0p6b_a2d_finetune"].model)
    with pytest.raises(
        ValueError, match=r"num_layers=28 \(checkpoint: 2\).*; no recipe has its sizes: set model.config"
    ):
        StartFrom(init_from=str(imported), data=MockDataModule(vocab_size=196)).setup(None, model)
