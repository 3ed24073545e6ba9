"""How many tokens a model has, how many rows it holds, and which token is the mask."""

from nemo.collections.llm.gpt.model.base import GPTConfig

from nemo_dllm.collections.diffusion.objectives import Objective


def built_vocab_size(config: GPTConfig, tokenizer) -> tuple[int, int]:
    """Number of tokens, and number of embedding rows over all tensor-parallel ranks.

    A size that the config names is kept but for what tensor parallelism needs; one that comes from the tokenizer is
    padded to ``config.make_vocab_size_divisible_by`` per rank. Padding rows never take probability.

    Raises:
        ValueError: where neither the config nor a tokenizer tells the size, or the tokenizer has more tokens.
    """
    ranks = config.tensor_model_parallel_size
    if config.vocab_size is not None and tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, config.vocab_size={config.vocab_size}; "
            f"set vocab_size={tokenizer.vocab_size} or None, or choose the model's own tokenizer"
        )
    if config.vocab_size is not None:
        return config.vocab_size, _round_up(config.vocab_size, ranks)
    if tokenizer is None:
        raise ValueError("config.vocab_size is None and there is no tokenizer; set one of them")
    return tokenizer.vocab_size, _round_up(tokenizer.vocab_size, ranks * config.make_vocab_size_divisible_by)


def check_mask_token(objective: Objective, tokenizer, vocab_size: int) -> None:
    """Fill in the tokenizer's mask token where the objective names none, and check that it is a token.

    Raises:
        ValueError: where there is no mask token, or its id is outside the vocabulary.
    """
    if objective.mask_token_id is None:
        mask_token_id = getattr(tokenizer, "mask_id", None)
        if mask_token_id is None or mask_token_id < 0:
            raise ValueError(
                "mask_token_id is None and the tokenizer has no mask token; set objective.mask_token_id to the id of "
                f"an unused token below vocab_size={vocab_size}"
            )
        objective.mask_token_id = mask_token_id
    if not 0 <= objective.mask_token_id < vocab_size:
        raise ValueError(
            f"mask_token_id={objective.mask_token_id} is outside the vocabulary of {vocab_size}; "
            f"choose an id below it or set vocab_size={objective.mask_token_id + 1}"
        )


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
