"""Fine-tuning data below a stand-in trainer that holds the fields read, and NeMo's real samplers and io."""

import importlib
import json
from types import SimpleNamespace

import pytest

from nemo_dllm.collections.diffusion.data.tokenizer import byte_tokenizer

pytestmark = pytest.mark.nemo

LAYOUTS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
OPTIONS = [{}, {"pad_to_multiple_of": 8, "group_by_length": True}, {"packing": True, "block_size": 4}]
CONVERSATIONS = [("q" * (i % 11 + 1), f"answer {i} " + "a" * (i * 7 % 19)) for i in range(40)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    byte_tokenizer(folder / "byte")
    for name, rows in (("train", CONVERSATIONS), ("other", CONVERSATIONS[:5])):
        lines = (json.dumps({"question": question, "answer": answer}) for question, answer in rows)
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def module():
    return importlib.import_module("nemo_dllm.collections.diffusion.data.supervised_datamodule")


@pytest.fixture
def build(module, files):
    def make(trainer=None, **fields):
        fields = {
            "seq_length": 64,
            "global_batch_size": 4,
            "columns": {"prompt": "question", "completion": "answer"},
            "chat_template": "",
            "validation_fraction": 0.2,
            "cache_dir": files / "cache",
            "seed": 3,
            "path": files / "train.jsonl",
            **fields,
        }
        data = module.SupervisedDataModule(tokenizer=str(files / "byte"), **fields)
        data.trainer = trainer or SimpleNamespace(max_steps=20, global_step=0)
        data.prepare_data()
        data.setup("fit")
        return data

    return make


def global_batches(data, loader, monkeypatch, data_parallel_size=1):
    """Per optimizer step, what all ranks see together, by sample index; all micro-batches of a step have one shape."""
    from megatron.core import parallel_state

    per_rank = []
    for rank in range(data_parallel_size):
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda rank=rank: rank)
        monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: data_parallel_size)
        per_rank.append(list(data.data_sampler.transform_dataloader(loader)))
    per_step = data.global_batch_size // (data.micro_batch_size * data_parallel_size)
    steps = []
    for start in range(0, len(per_rank[0]), per_step):
        micro = [batch for batches in per_rank for batch in batches[start : start + per_step]]
        assert len({batch["tokens"].shape for batch in micro}) == 1
        assert all(value.shape[0] == data.micro_batch_size for batch in micro for value in batch.values())
        rows = [
            {name: value[row].tolist() for name, value in b.items()} for b in micro for row in range(len(b["tokens"]))
        ]
        steps.append(sorted(rows, key=lambda row: row["sample_index"]))
    return steps


@pytest.mark.parametrize("options", OPTIONS)
def test_every_layout_feeds_the_same_global_batches(build, monkeypatch, options):
    straight = None
    for micro, data_parallel_size in LAYOUTS:
        data = build(micro_batch_size=micro, **options)
        steps = global_batches(data, data.train_dataloader(), monkeypatch, data_parallel_size)
        straight = straight or steps
        assert steps == straight
    assert [row["sample_index"] for step in straight for row in step] == list(range(80))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", [(1, 2), (4, 1)])
def test_resume_continues_the_straight_run(build, monkeypatch, options, layout):
    first = build(**options)
    straight = global_batches(first, first.train_dataloader(), monkeypatch)
    first.trainer.global_step = 7
    state = first.state_dict()
    micro, data_parallel_size = layout
    resumed = build(micro_batch_size=micro, **options)
    resumed.load_state_dict(state)
    resumed.trainer.global_step = 7
    assert global_batches(resumed, resumed.train_dataloader(), monkeypatch, data_parallel_size) == straight[7:]


@pytest.mark.parametrize("options", OPTIONS[1:])
def test_loader_processes_change_nothing(build, monkeypatch, options):
    """Nor does their number from one start of a run to the next."""
    first = build(num_workers=0, **options)
    straight = global_batches(first, first.train_dataloader(), monkeypatch)
    first.trainer.global_step = 9
    resumed = build(num_workers=2, **options)
    resumed.load_state_dict(first.state_dict())
    resumed.trainer.global_step = 9
    assert global_batches(resumed, resumed.train_dataloader(), monkeypatch, 2) == straight[9:]


@pytest.mark.parametrize("options", OPTIONS)
def test_resume_with_another_global_batch_reads_on(build, monkeypatch, options):
    def tokens(steps):
        return [[t for t, real in zip(row["tokens"], row["key_mask"], strict=True) if real] for s in steps for row in s]

    first = build(**options)
    straight = tokens(global_batches(first, first.train_dataloader(), monkeypatch))
    first.trainer.global_step = 7
    resumed = build(global_batch_size=8, **options)
    resumed.load_state_dict(first.state_dict())
    resumed.trainer.global_step = 7
    steps = global_batches(resumed, resumed.train_dataloader(), monkeypatch, 2)
    assert steps[0][0]["sample_index"] == 28
    assert tokens(steps)[:52] == straight[28:80]


def test_training_and_validation_share_no_sample(build, module, files, tmp_path):
    data = build()
    samples = [
        [s.sample(i).tokens.tolist() for i in range(len(s))] for s in (data.training_samples, data.validation_samples)
    ]
    assert len(samples[0]) + len(samples[1]) == 40 and 2 <= len(samples[1]) <= 16
    assert not any(sample in samples[0] for sample in samples[1])
    # A sample's side does not depend on the others.
    few = build(validation_fraction=1e-9)
    assert (len(few.training_samples), len(few.validation_samples)) == (39, 1)
    named = build(validation_path=files / "other.jsonl")
    assert (len(named.training_samples), len(named.validation_samples)) == (40, 5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", [(1, 1), (2, 2)])
def test_validation_counts_every_sample_once(build, monkeypatch, options, layout, files):
    data = build(micro_batch_size=layout[0], validation_path=files / "other.jsonl", **options)
    rows = [row for step in global_batches(data, data.val_dataloader(), monkeypatch, layout[1]) for row in step]
    trained = sum(sum(row["loss_mask"]) for row in rows)
    samples = data.validation_samples
    assert trained == sum(int(samples.sample(i).loss_mask.sum()) for i in range(5))
    assert len(rows) % 4 == 0
    limited = build(num_val_rows=1, validation_path=files / "other.jsonl", **options)
    counted = [row for row in limited.val_dataloader().dataset if row["loss_mask"].any()]
    assert len(counted) == 1


def test_trained_padding(build):
    row = build(supervise_padding=True).train_dataloader().dataset[0]
    assert "key_mask" not in row
    stop = row["tokens"].tolist().index(256)
    assert row["loss_mask"][stop:].all() and not row["loss_mask"][0]
    data = build(supervise_padding=True, packing=True)
    for dataset in (data.train_dataloader().dataset, data.val_dataloader().dataset):
        assert "key_mask" not in dataset[0] and dataset[0]["loss_mask"][-1]


def test_field_errors(module, files):
    cases = {
        "loss_turns='first' is unknown": {"loss_turns": "first"},
        "seed=-1 must not be negative": {"seed": -1},
        "num_val_rows=0 must be at least 1, or None": {"num_val_rows": 0},
        "seq_length=64 is not a multiple of block_size=5": {"block_size": 5},
        "seq_length=64 is not a multiple of pad_to_multiple_of=48": {"pad_to_multiple_of": 48},
        "packing=True leaves no room for pad_to_multiple_of=8": {"packing": True, "pad_to_multiple_of": 8},
        "max_bad_rows=-1 must be at least 0": {"max_bad_rows": -1},
        "packing=True leaves no room for group_by_length=True": {"packing": True, "group_by_length": True},
        "columns={'question': 'q'} has unknown question": {"columns": {"question": "q"}},
        "validation_fraction=2 must be between 0 and 1": {"validation_fraction": 2},
        "global_batch_size=3 is not a multiple of micro_batch_size=2": {"global_batch_size": 3, "micro_batch_size": 2},
    }
    for message, fields in cases.items():
        with pytest.raises(ValueError, match=message):
            module.SupervisedDataModule("x", "y", **{"seq_length": 64, **fields})


def test_missing_files_and_templates_are_named(build, module, files):
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist"):
        build(validation_path="nowhere")
    # Not the questions of our own: those are for no path.
    with pytest.raises(ValueError, match="there is no input"):
        build(path=[])
    with pytest.raises(ValueError, match="an input has an empty name"):
        build(path="")
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        build(chat_template=None)
    with pytest.raises(FileNotFoundError, match="tokenizer='./nowhere' does not exist"):
        _ = module.SupervisedDataModule("x", "./nowhere").tokenizer
    with pytest.raises(ValueError, match="none of .* samples has an answer within seq_length=1 tokens"):
        build(seq_length=1)


def test_checkpoint_context(build, tmp_path):
    from nemo.lightning import io

    data = build(template_arguments={"enable_thinking": False}, block_size=4)
    data.io_dump(tmp_path / "context", yaml_attrs=[])
    loaded = io.load(tmp_path / "context")
    assert (loaded.block_size, loaded.template_arguments, loaded.columns) == (
        4,
        {"enable_thinking": False},
        {"prompt": "question", "completion": "answer"},
    )


def test_no_path_reads_questions_of_our_own(module, files):
    data = module.SupervisedDataModule(
        None, str(files / "byte"), seq_length=256, global_batch_size=4, chat_template="", cache_dir=files / "cache"
    )
    data.trainer = SimpleNamespace(max_steps=20, global_step=0)
    data.setup("fit")
    assert len(data.training_samples) + len(data.validation_samples) == 60
    # Each answer is as many tokens as bytes, and an end token.
    rows = data.validation_dataset()
    trained = sum(int(rows[index]["loss_mask"].sum()) for index in range(len(rows)))
    assert data.num_validation_bytes == trained - len(data.validation_samples) > 0


def test_a_tokenizer_is_needed_and_can_come_later(module, files):
    data = module.SupervisedDataModule(files / "train.jsonl")
    with pytest.raises(ValueError, match=r"tokenizer=None: name a Hugging Face tokenizer folder, or .* \(init_from\)"):
        data.tokenizer  # noqa: B018
    data.tokenizer = str(files / "byte")
    assert data.tokenizer.vocab_size == 258
