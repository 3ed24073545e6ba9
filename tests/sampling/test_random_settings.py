"""What holds under any settings, of many drawn ones, on a small model."""

import random

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import SamplerConfig, generate, generate_stream, generation_result, infill

VOCABULARY, M = 11, 10


CACHES = (None, None, "exact", "approximate_prefix", "approximate_dual", "approximate_delayed")
CHOICES = {
    "block_size": (None, 1, 2, 3, 4, 8, 40),
    "refresh_interval": (1, 2, 5),
    "threshold": (None, None, 0, 0.3, 0.9, 1.5, 1e9),
    "temperature": (0.0, 0.0, 1e-300, 1e-8, 0.1, 1.0, 5.0, 1e30),
    "top_k": (None, None, 1, 2, VOCABULARY, 10**12),
    "top_p": (None, None, 1e-300, 0.5, 1.0),
    "remasking": ("confidence", "margin", "entropy", "random"),
    "remasking_temperature": (0.0, 0.0, 0.0, 1e-300, 0.5),
    "tempered_confidence": (False, False, True),
    "cfg_scale": (0.0, 0.0, 0.5, 3.0),
    "right_shift": (False, False, True),
    "bos_token_id": (None, 0),
    "eos_token_id": (None, 0, 3),
    "eos_penalty": (0.0, 1.0, 1e30),
    "stop_token_ids": ((), (), (4, 5)),
    "suppress_token_ids": ((), (), (1, 2, 3), tuple(range(9))),
    "begin_suppress_token_ids": ((), (), (8, 7)),
    "editing_threshold": (None, None, 0, 0.3),
    "max_post_steps": (0, 1, 3),
    "max_length": (None, None, None, 12),
    "block_origin": (None, "prompt", "sequence"),
    "schedule": ("linear", "cosine", "even", "even_block"),
}


def drawn_settings(rng):
    fields = {name: rng.choice(values) for name, values in CHOICES.items()}
    fields |= {"max_new_tokens": rng.choice((1, 2, 3, 5, 8, 13)), "seed": rng.randint(-9, 9)}
    fields["min_new_tokens"] = rng.choice((0, 0, rng.randint(0, fields["max_new_tokens"])))
    cache = rng.choice(CACHES)
    if cache == "approximate_delayed" or fields["block_size"]:
        fields["cache"] = cache
    pace = rng.choice(("", "", "steps", "steps_per_block"))
    most = {"steps": fields["max_new_tokens"], "steps_per_block": fields["block_size"] or fields["max_new_tokens"]}
    if pace:
        fields[pace] = rng.randint(1, most[pace])
    if rng.random() < 0.2 and fields["eos_token_id"] is not None:
        fields["stop_strings"] = ("ab", "cj")
    return fields


def decode(ids):
    return "".join("abcdefghijk"[token] for token in ids)


def check(model, prompts, config):
    steps = list(generate_stream(model, prompts, config, mask_token_id=M, decode=decode))
    result = generation_result(steps[-1], prompts, config, decode)
    for prompt, row, completion in zip(prompts, result.sequences, result.completions, strict=True):
        given = prompt or ([] if config.bos_token_id is None else [config.bos_token_id])
        assert row.tolist() == given + completion.tolist()
        chosen = set(completion.tolist())
        assert M not in chosen and not chosen & set(config.suppress_token_ids)
        assert 1 <= len(completion) <= config.max_new_tokens
        assert completion[0].item() not in config.begin_suppress_token_ids
        assert not set(completion[: config.min_new_tokens].tolist()) & {config.eos_token_id, *config.stop_token_ids}
    assert not steps[-1].holes_BT.any()
    for row, prompt in enumerate(prompts):
        alone = generate(model, [prompt], config, mask_token_id=M, row_ids=[row], decode=decode)
        assert alone.sequences[0].tolist() == result.sequences[row].tolist()


@pytest.mark.parametrize("part", range(2))
def test_holes_are_filled_and_all_else_stays(tiny_attention, part):
    rng = random.Random(part)
    for _ in range(40):
        fields = drawn_settings(rng) | {"max_length": None}
        blocks = fields["block_size"] if fields.get("cache") == "exact" else None
        model, rows, holes = tiny_attention(VOCABULARY, blocks, seed=rng.randint(0, 50)), [], []
        for length in rng.choices((0, 0, 1, 2, 5, 12), k=rng.randint(1, 3)):
            rows.append([rng.randrange(VOCABULARY) for _ in range(length)])
            share = rng.choice((0, 0.3, 0.7, 1))
            holes.append([rng.random() < share for _ in range(length)])

        def fill(numbers, fields=fields, model=model, rows=rows, holes=holes):
            given = [rows[n] for n in numbers], [holes[n] for n in numbers]
            return infill(model, *given, SamplerConfig(**fields), mask_token_id=M, row_ids=numbers).sequences

        for number, filled in enumerate(fill(range(len(rows)))):
            about = f"{fields} {rows} {holes} {number}"
            assert filled.tolist() == fill([number])[0].tolist(), about
            for token, given, hole in zip(filled.tolist(), rows[number], holes[number], strict=True):
                assert token not in (M, *fields["suppress_token_ids"]) if hole else token == given, about


@pytest.mark.parametrize("part", range(3))
def test_no_mask_leaves_prompts_stay_and_batches_do_not_matter(tiny_attention, part):
    rng, done, refused = random.Random(part), 0, []
    while done < 25:
        dtype, scale = rng.choice([(torch.float64, 1.0), (torch.float64, 3.0), (torch.bfloat16, 200.0)])
        model = tiny_attention(VOCABULARY, seed=rng.randint(0, 50), dtype=dtype, scale=scale)
        prompts = [
            [rng.randrange(VOCABULARY) for _ in range(rng.choice((0, 1, 2, 9)))] for _ in range(rng.randint(1, 4))
        ]
        fields = drawn_settings(rng)
        try:
            check(model, prompts, SamplerConfig(**fields))
        except ValueError as error:
            refused.append(str(error))
            continue
        except AssertionError as error:
            raise AssertionError(f"{fields} {prompts} {dtype} {scale}") from error
        done += 1
    known = ("right_shift scores each token", "leaves no room", "leave a token to choose")
    assert all(any(part in text for part in known) for text in refused)


class OnCPU:
    """A model that makes its tensors on the CPU, wherever its caller makes them."""

    def __init__(self, model):
        self.model = model

    def __call__(self, *args, **kwargs):
        with torch.device("cpu"):
            return self.model(*args, **kwargs)

    def __getattr__(self, name):
        method = getattr(self.model, name)
        if not callable(method):
            return method

        def on_cpu(*args, **kwargs):
            with torch.device("cpu"):
                return method(*args, **kwargs)

        return on_cpu


def test_the_default_device_does_not_matter(tiny_attention):
    """As in a script that begins with torch.set_default_device("cuda"); here its tensors would have no numbers."""
    rng, done = random.Random(7), 0
    while done < 25:
        model = OnCPU(tiny_attention(VOCABULARY, seed=rng.randint(0, 50)))
        prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.choice((0, 1, 2, 9)))] for _ in range(3)]
        config = SamplerConfig(**drawn_settings(rng))
        try:
            expected = generate(model, prompts, config, mask_token_id=M, decode=decode)
        except ValueError:
            continue
        with torch.device("meta"):
            found = generate(model, prompts, config, mask_token_id=M, decode=decode)
            filled = infill(model, prompts, [[True] * len(row) for row in prompts], config, mask_token_id=M).sequences
        again = infill(model, prompts, [[True] * len(row) for row in prompts], config, mask_token_id=M).sequences
        assert [row.tolist() for row in found.sequences] == [row.tolist() for row in expected.sequences], config
        assert [row.tolist() for row in filled] == [row.tolist() for row in again], config
        done += 1
