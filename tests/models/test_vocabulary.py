"""Number of tokens, rows of the table, and the mask token."""

import pytest
import torch

from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion

pytestmark = pytest.mark.nemo


def config_of(**fields):
    from nemo.collections.llm import GPTConfig

    return GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=4, **fields)


def tokenizer_of(vocab_size, mask_token_id=None):
    from nemo_dllm.collections.diffusion.data.mock_datamodule import MockTokenizer

    return MockTokenizer(vocab_size, mask_token_id)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"vocab_size": 200}, (200, 200)),
        ({"vocab_size": 200, "tensor_model_parallel_size": 2}, (200, 200)),
        ({"vocab_size": 201, "tensor_model_parallel_size": 2}, (201, 202)),
        ({"vocab_size": 201, "tensor_model_parallel_size": 4}, (201, 204)),
        # A size that the config names is that of a checkpoint: not rounded up.
        ({"vocab_size": 200, "make_vocab_size_divisible_by": 128}, (200, 200)),
        ({"make_vocab_size_divisible_by": 1}, (190, 190)),
        ({"make_vocab_size_divisible_by": 128}, (190, 256)),
        ({"make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 4}, (190, 512)),
        ({"make_vocab_size_divisible_by": 10}, (190, 190)),
    ],
    ids=str,
)
def test_tokens_and_rows(fields, expected):
    from nemo_dllm.collections.diffusion.models.vocabulary import built_vocab_size

    assert built_vocab_size(config_of(**fields), tokenizer_of(190)) == expected


def test_no_size_at_all():
    from nemo_dllm.collections.diffusion.models.vocabulary import built_vocab_size

    with pytest.raises(ValueError, match=r"config\.vocab_size is None and there is no tokenizer; set one of them"):
        built_vocab_size(config_of(), None)


def check(objective, tokenizer, vocab_size=200):
    from nemo_dllm.collections.diffusion.models.vocabulary import check_mask_token

    check_mask_token(objective, tokenizer, vocab_size)
    return objective.mask_token_id


def test_the_tokenizers_mask_token_fills_in_and_the_objectives_own_wins():
    assert check(MaskedDiffusion(), tokenizer_of(200)) == 199
    assert check(MaskedDiffusion(mask_token_id=7), tokenizer_of(200)) == 7
    assert check(MaskedDiffusion(mask_token_id=0), None) == 0


@pytest.mark.parametrize("tokenizer", [None, object(), type("Tokenizer", (), {"mask_id": -1})()], ids=type)
def test_no_mask_token(tokenizer):
    with pytest.raises(ValueError, match=r"mask_token_id is None and the tokenizer has no mask token; .*size=200"):
        check(MaskedDiffusion(), tokenizer)


def test_a_mask_token_outside_the_vocabulary():
    text = r"mask_token_id=200 is outside the vocabulary of 200; choose an id below it or set vocab_size=201"
    with pytest.raises(ValueError, match=text):
        check(MaskedDiffusion(mask_token_id=200), None)
    with pytest.raises(ValueError, match=r"mask_token_id=255 is outside the vocabulary of 200"):
        check(MaskedDiffusion(), tokenizer_of(200, mask_token_id=255))
    assert check(MaskedDiffusion(mask_token_id=199), None) == 199


def test_the_model_refuses_it_before_it_is_built(build_model):
    with pytest.raises(ValueError, match=r"mask_token_id=200 is outside the vocabulary of 200"):
        build_model(objective=MaskedDiffusion(mask_token_id=200))


def test_padding_rows_take_no_probability(build_model):
    """190 tokens in a table of 256 rows: logits, loss and gradients are those of 190."""
    model = build_model(
        objective=MaskedDiffusion(group_size=4), tokenizer=tokenizer_of(190), vocab_size=None,
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    assert model.objective.mask_token_id == 189
    assert model.config.vocab_size is None
    head = model.module.output_layer.weight
    assert head.shape == model.module.embedding.word_embeddings.weight.shape == (256, 32)
    with torch.no_grad():
        head[190:] = 100.0
    batch = {
        "tokens": torch.randint(0, 189, (4, 12), generator=torch.Generator().manual_seed(0)),
        "loss_mask": torch.ones(4, 12, dtype=torch.bool),
        "sample_index": torch.arange(4),
    }
    output = model.training_step(model.training_data_step(iter([batch])))
    output.loss_sum.backward()
    assert model(batch["tokens"]).shape == (4, 12, 190)
    assert output.nll_N.max() < 50
    assert torch.equal(head.grad[190:], torch.zeros(66, 32))
    assert head.grad[:190].abs().max() > 0


def test_a_tokenizer_with_more_tokens_than_the_model():
    from nemo_dllm.collections.diffusion.models.vocabulary import built_vocab_size

    assert built_vocab_size(config_of(vocab_size=200), tokenizer_of(200)) == (200, 200)
    with pytest.raises(ValueError, match="the tokenizer has 201 tokens, config.vocab_size=200; set vocab_size=201"):
        built_vocab_size(config_of(vocab_size=200), tokenizer_of(201))
