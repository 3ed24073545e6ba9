"""Which checkpoint a run goes on from, and that it then is the run that was never stopped."""

import io
import os
import pickle
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from .conftest import BATCH, INTERVAL, KILLED_AFTER, STEPS

pytestmark = pytest.mark.nemo

COMMON = io.BytesIO()
torch.save({}, COMMON)
COMMON = COMMON.getvalue()


def checkpoints_of(folder):
    """Names of the checkpoints of a run by (samples consumed, whether it is a ``-last``)."""
    names = {}
    for path in (folder / "mdlm_tiny" / "checkpoints").iterdir():
        samples, last = re.search(r"consumed_samples=(\d+)\.0(-last)?$", path.name).groups()
        names[int(samples), last is not None] = path
    return names


def fake_checkpoint(folder, name, seconds, without=()):
    """A folder with the files that a complete checkpoint has, written at a time."""
    weights = folder / name / "weights"
    weights.mkdir(parents=True)
    contents = {
        ".metadata": pickle.dumps(Metadata(state_dict_metadata={}, storage_data={})),
        "metadata.json": b"{}",
        "common.pt": COMMON,
    }
    for file in contents.keys() - set(without):
        (weights / file).write_bytes(contents[file])
        os.utime(weights / file, (seconds, seconds))
    return folder / name


def test_the_latest_is_the_one_written_last_whatever_its_name(tmp_path):
    from nemo_dllm.collections.diffusion.training.checkpoints import latest_checkpoint

    fake_checkpoint(tmp_path, "a-step=9", 100)
    newest = fake_checkpoint(tmp_path, "a-step=5", 300)
    fake_checkpoint(tmp_path, "a-step=7-last", 200)
    assert latest_checkpoint(tmp_path) == newest


@pytest.mark.parametrize("missing", [".metadata", "metadata.json", "common.pt"])
def test_what_was_not_written_to_its_end_is_passed_over(tmp_path, missing):
    from nemo_dllm.collections.diffusion.training.checkpoints import is_complete, latest_checkpoint

    older = fake_checkpoint(tmp_path, "older", 100)
    newer = fake_checkpoint(tmp_path, "newer-last", 200, without={missing})
    assert not is_complete(newer)
    assert latest_checkpoint(tmp_path) == older


def test_a_marker_beside_a_checkpoint_makes_it_unfinished(tmp_path):
    from nemo_dllm.collections.diffusion.training.checkpoints import latest_checkpoint

    older = fake_checkpoint(tmp_path, "older", 100)
    newer = fake_checkpoint(tmp_path, "newer", 200)
    assert latest_checkpoint(tmp_path) == newer
    (tmp_path / "newer-unfinished").touch()
    assert latest_checkpoint(tmp_path) == older
    (tmp_path / "older-unfinished").touch()
    assert latest_checkpoint(tmp_path) is None


def test_nothing_complete_and_nothing_there(tmp_path):
    from nemo_dllm.collections.diffusion.training.checkpoints import latest_checkpoint

    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "absent") is None
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    assert latest_checkpoint(tmp_path) is None


def test_the_best_and_the_last_checkpoint_are_kept(straight, straight_folder):
    kept = checkpoints_of(straight_folder)
    loss = {step * BATCH: metrics["validation/loss"] for step, metrics in straight["validations"]}
    best = min(loss, key=loss.get)
    assert set(kept) == {(best, False), (STEPS * BATCH, True)}
    assert f"val_loss={loss[best]:.4f}-" in kept[best, False].name


@pytest.mark.parametrize(
    "metrics, name", [({}, "m--epoch=0-last"), ({"val_loss": torch.tensor(1.5)}, "m--val_loss=1.5000-epoch=0-last")]
)
def test_no_loss_is_named_before_the_first_validation(metrics, name):
    from nemo_dllm.collections.diffusion.training.checkpoints import CommonModelCheckpoint

    saving = CommonModelCheckpoint(monitor="val_loss")
    template = "m--{val_loss:.4f}-{epoch}-last"
    assert saving.format_checkpoint_name({"epoch": torch.tensor(0)} | metrics, template) == f"{name}.ckpt"


def test_real_checkpoints_are_complete(killed_folder):
    from nemo_dllm.collections.diffusion.training.checkpoints import is_complete, latest_checkpoint

    kept = checkpoints_of(killed_folder)
    assert set(kept) == {(12, False), (24, False), (24, True)}
    assert all(map(is_complete, kept.values()))
    assert latest_checkpoint(killed_folder / "mdlm_tiny" / "checkpoints") == kept[24, True]


def assert_goes_on(record, straight, start):
    """From a step to the end it is the straight run: data, losses, rates and validations."""
    assert record["start"] == start
    for field in ("losses", "samples", "rates"):
        assert record[field] == {step: value for step, value in straight[field].items() if int(step) > start}, field
    assert record["validations"] == [[step, metrics] for step, metrics in straight["validations"] if step > start]


@pytest.mark.parametrize(
    "broken, start",
    [([], 6), ([(24, True)], 6), ([(24, True), (24, False)], 3), ([(24, True), (24, False), (12, False)], 0)],
    ids=["all complete", "the last cut short", "the last two cut short", "none complete"],
)
def test_a_killed_run_goes_on_from_the_latest_complete_checkpoint(run_recipe, straight, killed, broken, start):
    for which in broken:
        (checkpoints_of(killed)[which] / "weights" / ".metadata").unlink()
    assert_goes_on(run_recipe(killed), straight, start)


def test_a_checkpoint_that_a_kill_left_unfinished_is_passed_over(run_recipe, straight, killed):
    kept = checkpoints_of(killed)
    for which in ((24, True), (24, False)):
        kept[which].with_name(f"{kept[which].name}-unfinished").touch()
    assert_goes_on(run_recipe(killed), straight, 3)


def test_the_run_was_killed_in_between(straight):
    """What the tests above assume."""
    assert INTERVAL < 2 * INTERVAL < KILLED_AFTER < STEPS
    assert len(set(straight["losses"].values())) == STEPS


def test_going_on_keeps_one_best_and_one_last_checkpoint(run_recipe, straight, tmp_path):
    """Also where a kill came while the last one was written."""
    run_recipe(tmp_path, killed_after=KILLED_AFTER)
    last = checkpoints_of(tmp_path)[24, True]
    last.with_name(f"{last.name}-unfinished").touch()
    assert_goes_on(run_recipe(tmp_path), straight, 6)
    assert set(checkpoints_of(tmp_path)) == {(48, False), (48, True)}


def test_a_finished_run_ends_at_once(run_recipe, straight_folder, tmp_path):
    folder = shutil.copytree(straight_folder, tmp_path / "run")
    record = run_recipe(folder)
    assert record["losses"] == {}
    assert record["validations"] == []
    assert checkpoints_of(folder).keys() == checkpoints_of(straight_folder).keys()


def test_a_finished_run_can_be_made_longer(run_recipe, straight_folder, straight, tmp_path):
    """Not a multiple of the validation interval: like any run, it validates after its last step."""
    record = run_recipe(shutil.copytree(straight_folder, tmp_path / "run"), trainer__max_steps=STEPS + 4)
    assert record["start"] == STEPS
    assert [step for step, _ in record["validations"]] == [15, 16]
    assert [index for samples in record["samples"].values() for index in samples] == list(range(48, 64))


def test_validation_keeps_its_steps_where_checkpoints_are_saved_between(run_recipe, straight, tmp_path):
    """A checkpoint of every second step is saved before Lightning has counted that step."""
    every_second = {"log__ckpt__every_n_train_steps": 2, "log__ckpt__save_top_k": -1}
    run_recipe(tmp_path, killed_after=KILLED_AFTER, **every_second)
    record = run_recipe(tmp_path, trainer__check_val_every_n_epoch=1, **every_second)
    assert record["start"] == 6
    assert [step for step, _ in record["validations"]] == [9, 12]


def test_a_larger_batch_neither_repeats_nor_skips_samples(run_recipe, killed):
    """More samples a step than a checkpoint's steps had: 24 samples are behind it, 16 come with each step."""
    larger = {"data__micro_batch_size": 16, "data__global_batch_size": 16, "data__num_val_rows": 16}
    record = run_recipe(killed, trainer__max_steps=17, **larger)
    assert record["start"] == 6
    assert [index for samples in record["samples"].values() for index in samples] == list(range(24, 24 + 11 * 16))
    assert [step for step, _ in record["validations"]] == [9, 12, 15, 17]
    assert record["epoch"] == 0


def config_like(checkpoint, **fields):
    """The config that wrote a checkpoint, with some fields changed."""
    from nemo.lightning import io

    saved = io.load_context(checkpoint / "context", subpath="model.config")
    for field, value in fields.items():
        assert hasattr(saved, field)
        setattr(saved, field, value)
    return saved


def test_another_models_checkpoint_is_refused_by_the_fields_that_differ(killed_folder):
    from nemo_dllm.collections.diffusion.training.resume import check_same_model

    checkpoint = checkpoints_of(killed_folder)[24, True]
    check_same_model(checkpoint, config_like(checkpoint))
    # What does not change the weights may change.
    check_same_model(checkpoint, config_like(checkpoint, seq_length=8, attention_dropout=0.5))
    with pytest.raises(
        ValueError,
        match="-last is another model's: num_layers=2 there, 3 here; hidden_size=32 there, 64 here. "
        "Choose another run name or log folder, or the recipe that wrote it",
    ):
        check_same_model(checkpoint, config_like(checkpoint, num_layers=3, hidden_size=64))


@pytest.mark.parametrize(
    "field, value",
    [
        ("ffn_hidden_size", 50),
        ("num_attention_heads", 4),
        ("num_query_groups", 2),
        ("kv_channels", 8),
        ("num_moe_experts", 4),
        ("share_embeddings_and_output_weights", False),
        ("qk_layernorm", False),
        ("add_qkv_bias", True),
        ("vocab_size", 301),
    ],
)
def test_every_field_that_shapes_weights_is_compared(killed_folder, field, value):
    from nemo_dllm.collections.diffusion.training.resume import check_same_model

    checkpoint = checkpoints_of(killed_folder)[24, True]
    with pytest.raises(ValueError, match=f"is another model's: {field}=.* there, {value} here"):
        check_same_model(checkpoint, config_like(checkpoint, **{field: value}))


@pytest.fixture
def resume(monkeypatch):
    """Sets up a ``ResumeLatest``; returns the trainer's path."""
    from nemo.utils import AppState

    from nemo_dllm.collections.diffusion.training.resume import ResumeLatest

    monkeypatch.setattr(AppState(), "_log_dir", None, raising=False)

    def setup(config=None, **fields):
        trainer = SimpleNamespace(
            ckpt_path=None,
            checkpoint_callback=SimpleNamespace(),
            strategy=SimpleNamespace(),
            world_size=1,
            global_rank=0,
        )
        ResumeLatest(**fields).setup(trainer, config and SimpleNamespace(config=config))
        return trainer.ckpt_path

    return setup


def test_paths_that_do_not_exist(resume, tmp_path):
    from nemo.lightning import RestoreConfig

    absent = tmp_path / "absent"
    with pytest.raises(
        FileNotFoundError,
        match=f"^resume.resume_from_path={absent} does not exist; name a checkpoint folder or leave it out",
    ):
        resume(resume_from_path=str(absent))
    with pytest.raises(FileNotFoundError, match=f"^resume.restore_config.path={absent} does not exist"):
        resume(restore_config=RestoreConfig(path=str(absent)))


def test_a_folder_that_is_no_checkpoint(resume, killed_folder, tmp_path):
    config = config_like(checkpoints_of(killed_folder)[24, True])
    with pytest.raises(
        FileNotFoundError,
        match=r"holds no NeMo checkpoint \(no context/io.json\); name the folder that contains `context` and `weights`",
    ):
        resume(config, resume_from_path=str(tmp_path))


def test_a_named_checkpoint_wins_over_a_later_one(resume, killed_folder):
    kept = checkpoints_of(killed_folder)
    folder = str(killed_folder / "mdlm_tiny" / "checkpoints")
    config = config_like(kept[12, False])
    assert resume(config, resume_from_directory=folder) == kept[24, True] / "weights"
    named = resume(config, resume_from_directory=folder, resume_from_path=str(kept[12, False]))
    assert named == kept[12, False] / "weights"
    assert resume(config, resume_from_directory=folder, resume_if_exists=False) is None


def test_a_run_without_checkpoints_starts_anew_unless_told_otherwise(resume, tmp_path):
    assert resume(resume_from_directory=str(tmp_path)) is None
    with pytest.raises(
        FileNotFoundError,
        match=f"there is no complete checkpoint in {tmp_path}; resume.resume_ignore_no_checkpoint=True starts anew",
    ):
        resume(resume_from_directory=str(tmp_path), resume_ignore_no_checkpoint=False)


def test_the_wrong_model_is_refused_before_it_is_built(run_recipe, killed):
    with pytest.raises(AssertionError, match="is another model's: num_layers=2 there, 1 here"):
        run_recipe(killed, model__config__num_layers=1)


def test_a_checkpoint_of_other_tokens_is_refused(killed_folder, tmp_path):
    """Ids would mean something else, and the loss would only be somewhat worse."""
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
    from nemo.lightning import io

    from nemo_dllm.collections.diffusion.data.tokenizer import train_byte_bpe
    from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
    from nemo_dllm.collections.diffusion.training.resume import check_same_tokens

    checkpoint = next(iter(checkpoints_of(killed_folder).values()))
    tokenizer = io.load_context(checkpoint / "context", subpath="model.tokenizer")
    check_same_tokens(checkpoint, tokenizer, MaskedDiffusion())
    other = AutoTokenizer(str(train_byte_bpe(["quite another text, and again another"] * 9, 280, tmp_path / "bpe")))
    with pytest.raises(ValueError, match="was trained with another tokenizer, of 300 tokens; go on with the text"):
        check_same_tokens(checkpoint, other, MaskedDiffusion())
    with pytest.raises(ValueError, match="model.objective.right_shift=False, here it is True; set right_shift=False"):
        check_same_tokens(checkpoint, tokenizer, MaskedDiffusion(right_shift=True))
