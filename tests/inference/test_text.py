import io
import re

import pytest

pytestmark = pytest.mark.nemo


@pytest.fixture(scope="module")
def generate_text():
    from nemo_dllm.collections.diffusion.inference import generate_text

    return generate_text


@pytest.fixture(scope="module")
def print_generated():
    from nemo_dllm.collections.diffusion.inference.text import print_generated

    return print_generated


def test_text_goes_on_from_the_prompt(model, generate_text):
    text = generate_text(model, "w5 w7", model.sampler_config(max_new_tokens=6, stop_at_eos=False))
    words = text.split()
    assert words[:2] == ["w5", "w7"]
    # Special tokens, 191 and up, are no words.
    assert 2 < len(words) <= 8 and all(re.fullmatch(r"w\d+", word) for word in words)


def test_an_empty_prompt_is_a_prompt(model, generate_text):
    assert 1 <= len(generate_text(model, "", model.sampler_config(max_new_tokens=4)).split()) <= 4


def test_a_stop_string_ends_the_text(model, generate_text):
    config = model.sampler_config(max_new_tokens=8, stop_strings=(" ",), stop_at_eos=False, stop_token_ids=(192,))
    assert 1 <= len(generate_text(model, "w5", config).split()) <= 3


def test_watching_shows_the_text_and_does_not_change_it(model, generate_text):
    from rich.console import Console

    config = model.sampler_config(max_new_tokens=8, steps=4, temperature=1.0, seed=3)
    shown = Console(file=io.StringIO(), width=200)
    text = generate_text(model, "w5", config, show_on=shown)
    assert text == generate_text(model, "w5", config)
    assert "[step 4, 0 masked]" in shown.file.getvalue() and text in shown.file.getvalue()


def test_a_seed_repeats_the_text_and_none_does_not(print_generated, hf_folder, single_process, capsys):
    def printed(seed):
        print_generated(
            hf_folder, "w5", best=False, watch=False, seed=seed, max_new_tokens=24, temperature=2.0, stop_at_eos=False
        )
        return capsys.readouterr().out

    assert printed(7) == printed(7)
    assert printed(None) != printed(None)


def test_a_text_longer_than_the_training_samples_gets_a_note(print_generated, hf_folder, single_process, capsys):
    print_generated(hf_folder, "w5", best=False, watch=False, seed=0, max_new_tokens=512, steps=1)
    assert capsys.readouterr().err == "note: 513 tokens are more than the 512 of the training samples\n"
