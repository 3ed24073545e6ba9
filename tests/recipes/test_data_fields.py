"""Settings of data modules that are no plain values, as the command line reads them."""

import pytest

pytestmark = pytest.mark.nemo


@pytest.mark.parametrize(
    "field, text, value",
    [
        ("columns", "{'prompt': 'question', 'completion': 'answer'}", {"prompt": "question", "completion": "answer"}),
        ("columns", "null", None),
        ("template_arguments", "{'enable_thinking': False}", {"enable_thinking": False}),
        ("validation_path", "['a.jsonl', 'b.jsonl']", ["a.jsonl", "b.jsonl"]),
    ],
)
def test_settings_of_conversations(field, text, value):
    import nemo_run as run
    from nemo_run.cli.cli_parser import parse_cli_args

    import nemo_dllm.recipes  # noqa: F401
    from nemo_dllm.collections.diffusion.data.supervised_datamodule import SupervisedDataModule

    data = run.Config(SupervisedDataModule)
    parse_cli_args(data, [f"{field}={text}"], data)
    assert getattr(data, field) == value


def test_shares_of_corpora():
    import nemo_run as run
    from nemo_run.cli.cli_parser import parse_cli_args

    import nemo_dllm.recipes  # noqa: F401
    from nemo_dllm.collections.diffusion.data.pretraining_datamodule import PretrainingDataModule

    data = run.Config(PretrainingDataModule)
    parse_cli_args(data, ["paths=['corpora/mine', 'corpora/other']", "weights=[2, 1]"], data)
    assert (data.paths, data.weights) == (["corpora/mine", "corpora/other"], [2, 1])
