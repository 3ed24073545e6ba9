"""Which data a recipe of a family reads, and what of the model it takes over."""

import json
from pathlib import Path
from types import SimpleNamespace

import fiddle as fdl
import pytest

from nemo_dllm.collections.diffusion.data.tokenizer import byte_tokenizer

pytestmark = pytest.mark.nemo


@pytest.fixture(scope="module")
def recipe_of():
    import nemo_dllm.recipes  # noqa: F401
    from nemo_dllm.recipes.builder import RECIPES

    return lambda name, **arguments: RECIPES[name](**arguments)


@pytest.fixture
def corpus(tmp_path):
    """Prefix of a corpus, as far as a recipe looks."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").touch()
    return str(tmp_path / "corpus")


def data_class(recipe):
    return recipe.data.__fn_or_cls__.__name__


def test_every_recipe_takes_a_data_set(recipes, recipe_of, corpus, tmp_path):
    """At the sizes that it has without one."""
    for name, plain in recipes.items():
        if name.endswith("_tiny"):
            continue
        finetunes = not name.endswith("_pretrain")
        for dataset, reader in ((corpus, "PretrainingDataModule"), (str(tmp_path), "TextDataModule")):
            recipe = recipe_of(name, dataset=dataset, tokenizer="folder")
            assert data_class(recipe) == ("SupervisedDataModule" if finetunes else reader), name
            assert recipe.data.tokenizer == "folder"
            for size in ("seq_length", "micro_batch_size", "global_batch_size", "num_val_rows"):
                assert getattr(recipe.data, size) == getattr(plain.data, size), name


def test_no_data_set(recipe_of):
    """Questions need a tokenizer."""
    assert data_class(recipe_of("qwen3_8b_mdlm_finetune")) == "MockDataModule"
    for start in ({"init_from": "folder"}, {"tokenizer": "folder"}):
        recipe = recipe_of("qwen3_8b_mdlm_finetune", **start)
        assert data_class(recipe) == "SupervisedDataModule"
        assert (recipe.data.path, recipe.data.chat_template, recipe.data.tokenizer) == (
            None,
            "",
            start.get("tokenizer"),
        )
        assert data_class(recipe_of("qwen3_8b_mdlm_pretrain", **start)) == "MockDataModule"


def test_a_data_set_comes_with_the_template_of_the_tokenizer(recipe_of):
    recipe = recipe_of("llama31_8b_a2d_finetune", init_from="folder", dataset="chats.jsonl")
    assert recipe.data.path == "chats.jsonl"
    assert recipe.data.chat_template is None
    # That of the checkpoint, once it is read.
    assert recipe.data.tokenizer is None


def test_what_the_data_takes_over_from_the_model(recipe_of, corpus):
    def supervised(name):
        data = recipe_of(name, dataset="chats.jsonl", tokenizer="folder").data
        return data.block_size, data.supervise_padding

    for name in ("qwen3_8b_mdlm", "qwen25_7b_a2d", "llama31_8b_a2d", "llada_8b", "llada_moe_7b_a1b", "dream_7b"):
        for task in ("finetune", "lora"):
            assert supervised(f"{name}_{task}") == (None, True)
    for name, block_size in {"qwen3_8b_bd3lm": 32, "sdar_8b": 4, "sdar_30b_a3b": 4, "llada2_mini": 32}.items():
        assert supervised(f"{name}_finetune") == (block_size, False)
    for name in ("dream_7b", "llada_8b", "sdar_8b", "qwen3_8b_a2d"):
        recipe = recipe_of(f"{name}_pretrain", dataset=corpus, tokenizer="folder")
        assert (recipe.data.bos_token_id is not None) == recipe.model.objective.right_shift


# "ab" asks, "cd" and the end token 256 answer, in a row of 32.
_TRAINED_PADS = ([*b"abcd"] + [256] * 28, [0] * 2 + [1] * 30, None)
_FILLED_BLOCKS = {
    4: ([*b"abcd"] + [256] * 28, [0] * 2 + [1] * 6 + [0] * 24, [1] * 8 + [0] * 24),
    32: ([*b"abcd"] + [256] * 28, [0] * 2 + [1] * 30, [1] * 32),
}


@pytest.mark.parametrize(
    "name, expected",
    [
        ("llada_8b_finetune", _TRAINED_PADS),
        ("llada_moe_7b_a1b_finetune", _TRAINED_PADS),
        ("dream_7b_lora", _TRAINED_PADS),
        ("qwen3_0p6b_mdlm_finetune", _TRAINED_PADS),
        ("llama32_1b_a2d_finetune", _TRAINED_PADS),
        ("sdar_1p7b_finetune", _FILLED_BLOCKS[4]),
        ("llada2_mini_finetune", _FILLED_BLOCKS[32]),
        ("qwen3_0p6b_bd3lm_finetune", _FILLED_BLOCKS[32]),
    ],
)
def test_what_each_family_trains_of_a_short_row(recipe_of, tmp_path, name, expected):
    (tmp_path / "chats.jsonl").write_text('{"prompt": "ab", "completion": "cd"}')
    data = recipe_of(name, dataset=str(tmp_path / "chats.jsonl"), tokenizer=str(byte_tokenizer(tmp_path / "byte"))).data
    data.validation_path, data.cache_dir, data.chat_template = data.path, str(tmp_path), ""
    data.seq_length = 32
    module = fdl.build(data)
    module.trainer = SimpleNamespace(max_steps=1, global_step=0)
    module.prepare_data()
    module.setup("fit")
    row = module.training_dataset(1)[0]
    tokens, loss_mask, key_mask = expected
    assert (row["tokens"].tolist(), row["loss_mask"].int().tolist()) == (tokens, loss_mask)
    assert (row["key_mask"].int().tolist() if "key_mask" in row else None) == key_mask


def test_a_prefix_may_have_its_suffix(recipe_of, corpus):
    for suffix in ("", ".bin", ".idx"):
        recipe = recipe_of("qwen3_8b_mdlm_pretrain", dataset=corpus + suffix, tokenizer="folder")
        assert recipe.data.paths == corpus


def test_what_does_not_go_together(recipe_of, tmp_path):
    name = "qwen3_8b_mdlm_pretrain"
    with pytest.raises(ValueError, match="tokenizer=a and init_from=b: the checkpoint brings its own tokenizer; leave"):
        recipe_of(name, tokenizer="a", init_from="b")
    with pytest.raises(ValueError, match=r"dataset=c needs a tokenizer: set tokenizer \(.*\), or init_from \("):
        recipe_of(name, dataset="c")
    absent = tmp_path / "absent"
    with pytest.raises(FileNotFoundError, match=f"dataset={absent} is neither a text file .* corpus \\({absent}.idx"):
        recipe_of(name, dataset=str(absent), tokenizer="a")
    with pytest.raises(ValueError, match="^path='' is empty; name a text file or folder, or leave path out$"):
        recipe_of("mdlm_tiny", path="")
    with pytest.raises(FileNotFoundError, match=f"^path={absent} is neither a text file .*; name one that is there$"):
        recipe_of("mdlm_tiny", path=str(absent))


def test_the_questions_are_what_they_should_be():
    from nemo_dllm.collections.diffusion.data.chat import read_conversation
    from nemo_dllm.collections.diffusion.data.supervised_datamodule import BUILT_IN

    rows = [json.loads(line) for line in Path(BUILT_IN).read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 60
    for row in rows:
        question, answer = read_conversation(row).messages
        assert question["content"].startswith("Question: ") and question["content"].endswith("?\nAnswer:")
        assert answer["content"].startswith(" ") and answer["content"].endswith(".")
