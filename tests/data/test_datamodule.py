"""The data modules below a stand-in trainer that holds the fields they read, and NeMo's real samplers and io."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from nemo_dllm.collections.diffusion.data.text import Corpus, standard_library_sources
from nemo_dllm.collections.diffusion.data.tokenizer import byte_tokenizer

pytestmark = pytest.mark.nemo

ROWS, LENGTH = 10, 4


@pytest.fixture(scope="module")
def datamodule():
    return importlib.import_module("nemo_dllm.collections.diffusion.data.datamodule")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """41 training characters, 40 of them in 10 rows of 4 bytes; 7 in validation. All differ, so rows are known."""
    folder = tmp_path_factory.mktemp("corpus")
    characters = "".join(chr(code) for code in range(33, 33 + 48))
    (folder / "text.txt").write_text(characters)
    byte_tokenizer(folder / "byte")
    return folder


@pytest.fixture
def text_data(datamodule, corpus, tmp_path):
    def build(trainer=None, **fields):
        fields = {
            "seq_length": LENGTH,
            "validation_fraction": 7 / 48,
            "global_batch_size": 2,
            "micro_batch_size": 1,
            **fields,
        }
        data = datamodule.TextDataModule(corpus / "text.txt", corpus / "byte", cache_dir=tmp_path / "cache", **fields)
        data.trainer = trainer or make_trainer()
        data.prepare_data()
        data.setup("fit")
        return data

    return build


def make_trainer(**fields):
    return SimpleNamespace(**{"max_steps": 15, "global_step": 0, **fields})


def rank_batches(data, loader, monkeypatch, data_parallel_size):
    """The batches of each data-parallel rank, through the sampler that the strategy would use."""
    from megatron.core import parallel_state

    per_rank = []
    for rank in range(data_parallel_size):
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda rank=rank: rank)
        monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: data_parallel_size)
        per_rank.append(list(data.data_sampler.transform_dataloader(loader)))
    return per_rank


def global_batches(data, loader, monkeypatch, data_parallel_size):
    """Per optimizer step, the sorted (sample_index, first token) pairs that all ranks see together."""
    per_rank = rank_batches(data, loader, monkeypatch, data_parallel_size)
    assert {len(batches) for batches in per_rank} == {len(per_rank[0])}
    num_microbatches = data.global_batch_size // (data.micro_batch_size * data_parallel_size)
    steps = []
    for start in range(0, len(per_rank[0]), num_microbatches):
        micro = [batch for batches in per_rank for batch in batches[start : start + num_microbatches]]
        assert all(batch["tokens"].shape == (data.micro_batch_size, LENGTH) for batch in micro)
        steps.append(
            sorted((int(i), int(row[0])) for b in micro for i, row in zip(b["sample_index"], b["tokens"], strict=True))
        )
    return steps


def test_every_layout_feeds_the_same_global_batches(text_data, monkeypatch):
    straight = None
    for micro, data_parallel_size in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)):
        data = text_data(global_batch_size=4, micro_batch_size=micro)
        steps = global_batches(data, data.train_dataloader(), monkeypatch, data_parallel_size)
        straight = straight or steps
        assert steps == straight
    assert [i for step in straight for i, _ in step] == list(range(15 * 4))


def test_epochs_have_each_row_once(text_data, monkeypatch):
    data = text_data()
    order = [row for step in global_batches(data, data.train_dataloader(), monkeypatch, 1) for _, row in step]
    assert len(order) == 30
    for start in (0, 10, 20):
        assert sorted(order[start : start + 10]) == list(range(33, 33 + ROWS * LENGTH, LENGTH))
    assert order[:10] != order[10:20]


@pytest.mark.parametrize("resumed_layout", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("steps_before", [3, 5, 7])  # mid-epoch, at the border of an epoch, in the second epoch
def test_resume_continues_the_straight_run(text_data, monkeypatch, steps_before, resumed_layout):
    first = text_data()
    straight = global_batches(first, first.train_dataloader(), monkeypatch, 1)
    first.trainer.global_step = steps_before
    state = first.state_dict()
    assert state == {"consumed_samples": 2 * steps_before, "global_step": steps_before}

    micro, data_parallel_size = resumed_layout
    resumed = text_data(micro_batch_size=micro)
    resumed.load_state_dict(state)
    # Lightning restores the step after the data module.
    resumed.trainer.global_step = steps_before
    steps = global_batches(resumed, resumed.train_dataloader(), monkeypatch, data_parallel_size)
    assert steps == straight[steps_before:]

    resumed.trainer.global_step = steps_before + 2
    assert resumed.state_dict() == {"consumed_samples": 2 * steps_before + 4, "global_step": steps_before + 2}


def test_resume_with_another_global_batch_or_more_steps(text_data, monkeypatch):
    resumed = text_data(make_trainer(max_steps=20), global_batch_size=4)
    resumed.load_state_dict({"consumed_samples": 30, "global_step": 15})
    resumed.trainer.global_step = 15
    steps = global_batches(resumed, resumed.train_dataloader(), monkeypatch, 2)
    assert [i for step in steps for i, _ in step] == list(range(30, 50))
    resumed.trainer.global_step = 17
    assert resumed.state_dict() == {"consumed_samples": 38, "global_step": 17}
    resumed.setup("fit")  # a second fit of the same trainer
    assert resumed.consumed_samples == 38


def test_second_fit_continues_and_a_fresh_trainer_starts_over(text_data, monkeypatch):
    data = text_data()
    data.train_dataloader()
    data.trainer.global_step, data.trainer.max_steps = 15, 18
    data.setup("fit")
    assert data.consumed_samples == 30
    steps = global_batches(data, data.train_dataloader(), monkeypatch, 1)
    assert [i for step in steps for i, _ in step] == list(range(30, 36))
    data.trainer = make_trainer()
    data.setup("fit")
    assert data.consumed_samples == 0


def test_building_validation_loaders_does_not_move_the_position(text_data):
    data = text_data()
    data.train_dataloader()
    data.trainer.global_step = 4
    data.val_dataloader()
    data.test_dataloader()
    assert data.state_dict() == {"consumed_samples": 8, "global_step": 4}


def test_loader_of_a_finished_run_can_be_built(text_data, monkeypatch):
    data = text_data()
    data.load_state_dict({"consumed_samples": 30, "global_step": 15})
    data.trainer.global_step = 15
    rank_batches(data, data.train_dataloader(), monkeypatch, 1)


def test_training_needs_a_number_of_steps(text_data):
    data = text_data(make_trainer(max_steps=-1))
    with pytest.raises(ValueError, match=r"trainer.max_steps=-1 must be the number of optimizer steps"):
        data.train_dataloader()


@pytest.mark.parametrize("mode", ["val", "test"])
@pytest.mark.parametrize("layout", [(1, 1), (1, 2), (2, 2), (4, 1)])
def test_validation_counts_every_row_once_in_every_layout(text_data, monkeypatch, mode, layout):
    micro, data_parallel_size = layout
    data = text_data(micro_batch_size=micro, global_batch_size=4)
    data.load_state_dict({"consumed_samples": 12, "global_step": 3})  # the position is that of training only
    loader = data.val_dataloader() if mode == "val" else data.test_dataloader()
    batches = [b for batches in rank_batches(data, loader, monkeypatch, data_parallel_size) for b in batches]
    # 7 characters and the end of text make 2 rows; the global batch of 4 needs 2 fillers.
    rows = sorted(
        (int(i), bool(m.all()), bool(m.any()))
        for b in batches
        for i, m in zip(b["sample_index"], b["loss_mask"], strict=True)
    )
    assert rows == [(0, True, True), (1, True, True), (2, False, False), (3, False, False)]


def test_validation_accounting(text_data):
    data = text_data()
    assert (data.num_validation_tokens, data.num_validation_bytes) == (8, 7)
    # No validation character occurs in training, the end of text once: 42 training tokens, 258 ids.
    expected = -(7 * torch.tensor(1 / 300).log2() + torch.tensor(2 / 300).log2()) / 7
    assert data.unigram_bits_per_byte() == pytest.approx(float(expected), rel=1e-6)
    assert text_data(num_val_rows=1).num_validation_bytes == 4


def test_limits_count_microbatches(text_data, monkeypatch):
    from megatron.core import num_microbatches_calculator

    monkeypatch.setattr(num_microbatches_calculator, "get_num_microbatches", lambda: 2)
    limits = {"limit_train_batches": 1.0, "limit_val_batches": 3, "limit_test_batches": 0.0, "num_sanity_val_steps": 2}
    data = text_data(make_trainer(**limits))
    for _ in range(2):  # NeMo asks again whenever the trainer starts
        data.reconfigure_limit_batches()
        assert vars(data.trainer) | {
            "limit_train_batches": 1.0,
            "limit_val_batches": 6,
            "limit_test_batches": 0.0,
            "num_sanity_val_steps": 4,
        } == vars(data.trainer)
    data.trainer.limit_train_batches = 0.2  # 3 of 15 steps
    data.trainer.limit_val_batches = 0.5  # of one global batch: one at least
    data.reconfigure_limit_batches()
    assert (data.trainer.limit_train_batches, data.trainer.limit_val_batches) == (6, 2)


def test_loader_settings(text_data):
    has_cuda = torch.cuda.is_available()
    default, workers = text_data().train_dataloader(), text_data(num_workers=1).train_dataloader()
    assert (default.num_workers, default.persistent_workers) == ((2, True) if has_cuda else (0, False))
    assert (workers.num_workers, workers.persistent_workers) == (1, True)
    assert default.pin_memory == has_cuda
    assert [default.mode, text_data().val_dataloader().mode, text_data().test_dataloader().mode] == [
        "train",
        "validation",
        "test",
    ]


def test_tokenizer_is_trained_on_the_training_documents_only(datamodule, tmp_path):
    (tmp_path / "text.txt").write_text("ab" * 50 + "xy" * 50)
    data = datamodule.TextDataModule(
        tmp_path / "text.txt", vocab_size=300, validation_fraction=0.5, cache_dir=tmp_path / "cache"
    )
    tokenizer = data.tokenizer
    assert len(tokenizer.text_to_ids("abab")) < 4
    assert len(tokenizer.text_to_ids("xyxy")) == 4
    assert tokenizer.ids_to_text(tokenizer.text_to_ids("né 😀 don 't")) == "né 😀 don 't"
    assert tokenizer.text_to_ids("<|mask|>") == [tokenizer.mask_id]
    assert (tokenizer.mask_id, tokenizer.eos_id) == (tokenizer.vocab_size - 1, tokenizer.vocab_size - 2)
    assert tokenizer.pad_id == tokenizer.eos_id
    assert (
        datamodule.TextDataModule(
            tmp_path / "text.txt", vocab_size=300, validation_fraction=0.5, cache_dir=tmp_path / "cache"
        ).tokenizer.tokenizer.name_or_path
        == tokenizer.tokenizer.name_or_path
    )


def test_standard_library_is_the_default_text(datamodule, corpus, tmp_path, monkeypatch):
    part = Corpus(standard_library_sources().documents[:60], [], 0)  # all of it would take long as bytes
    monkeypatch.setattr(datamodule, "standard_library_sources", lambda: part)
    data = datamodule.TextDataModule(tokenizer=corpus / "byte", cache_dir=tmp_path, num_val_rows=8)
    data.trainer = make_trainer()
    data.setup("fit")
    assert data.num_validation_tokens == 8 * 512 >= data.num_validation_bytes > 8 * 500
    row = data.tokenizer.ids_to_text(data.train_dataloader().dataset[0]["tokens"].tolist())
    assert any(row in document.text for document in part.documents)


def test_field_errors(datamodule):
    cases = {
        "seq_length=0 must be at least 1": {"seq_length": 0},
        "micro_batch_size=0 must be at least 1": {"micro_batch_size": 0},
        "global_batch_size=-8 must be at least 1": {"global_batch_size": -8},
        "global_batch_size=6 is not a multiple of micro_batch_size=4 .*=4 or 8": {"global_batch_size": 6},
        "num_val_rows=0 must be at least 1": {"num_val_rows": 0},
        "seed=-1 must": {"seed": -1},
    }
    for message, fields in cases.items():
        with pytest.raises(ValueError, match=message):
            datamodule.TextDataModule(**fields)
        with pytest.raises(ValueError, match=message):
            datamodule.MockDataModule(vocab_size=8, **fields)
    with pytest.raises(ValueError, match="validation_fraction=1.5 must be between 0 and 1"):
        datamodule.TextDataModule(validation_fraction=1.5)
    with pytest.raises(ValueError, match="tokenizer of type MockTokenizer cannot encode a corpus"):
        datamodule.TextDataModule(tokenizer=datamodule.MockTokenizer(8))
    with pytest.raises(ValueError, match="vocab_size=None and tokenizer=None; set one"):
        datamodule.MockDataModule()


def test_missing_files_are_named_on_first_use(datamodule, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"path='.*nowhere' does not exist"):
        datamodule.TextDataModule(tmp_path / "nowhere", cache_dir=tmp_path).prepare_data()
    with pytest.raises(FileNotFoundError, match=r"tokenizer='.*nowhere' does not exist; name a folder with tokenizer"):
        _ = datamodule.TextDataModule(tokenizer=str(tmp_path / "nowhere"), cache_dir=tmp_path).tokenizer
    with pytest.raises(
        FileNotFoundError, match=r"tokenizer='.*' is neither .* it is a folder without a tokenizer .*\(.{1,130}\)$"
    ):
        _ = datamodule.TextDataModule(tokenizer=str(tmp_path), cache_dir=tmp_path).tokenizer


def test_too_little_text_names_both_numbers(text_data):
    with pytest.raises(ValueError, match="the validation text has 8 tokens, too few for one sequence of seq_length=9"):
        text_data(seq_length=9)


def test_checkpoint_context_carries_fields_and_tokenizer(datamodule, corpus, tmp_path):
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
    from nemo.lightning import io

    data = datamodule.TextDataModule(
        path=[corpus / "text.txt"], tokenizer=AutoTokenizer(str(corpus / "byte")), seq_length=4, seed=7
    )
    data.io_dump(tmp_path / "context", yaml_attrs=[])
    loaded = io.load(tmp_path / "context")
    assert (loaded.path, loaded.seq_length, loaded.seed) == ([str(corpus / "text.txt")], 4, 7)
    assert loaded.tokenizer.tokenizer.name_or_path.startswith(str(tmp_path / "context"))
    assert loaded.tokenizer.text_to_ids("A<|mask|>") == [65, 257]


def test_mock_data(datamodule, tmp_path):
    from nemo.lightning import io

    data = datamodule.MockDataModule(vocab_size=9, mask_token_id=4, seq_length=64, num_val_rows=10, global_batch_size=8)
    data.trainer = make_trainer()
    data.setup("fit")
    train, validation = data.train_dataloader().dataset, data.val_dataloader().dataset
    assert (len(train), len(validation)) == (15 * 8, 16)
    assert torch.stack([sample["tokens"] for sample in train]).unique().tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert not torch.equal(train[0]["tokens"], validation[0]["tokens"])
    data.io_dump(tmp_path / "context", yaml_attrs=[])
    loaded = io.load(tmp_path / "context")
    assert (loaded.vocab_size, loaded.mask_token_id, loaded.tokenizer.mask_id) == (9, 4, 4)


def test_mock_tokenizer(datamodule):
    tokenizer = datamodule.MockTokenizer(50)
    assert (tokenizer.vocab_size, tokenizer.mask_id, tokenizer.eos_id, tokenizer.pad_id) == (50, 49, 48, 48)
    assert datamodule.MockTokenizer(50, mask_token_id=7).eos_id == 49
    assert tokenizer.text_to_ids("7 12 0") == [7, 12, 0]
    assert tokenizer.ids_to_text(torch.tensor([7, 12, 0])) == "7 12 0"
    assert datamodule.MockDataModule(tokenizer=tokenizer).vocab_size == 50


@pytest.mark.parametrize("boundaries", [None, False, True])
def test_document_boundaries_reach_both_datasets(text_data, boundaries):
    data = text_data(document_boundaries=boundaries)
    samples = [data.training_dataset(20)[3], data.validation_dataset()[0]]
    assert [("document_ids" in sample) for sample in samples] == [bool(boundaries)] * 2
