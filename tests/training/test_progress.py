"""What a run says on the console."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.nemo


@pytest.fixture
def trainer():
    from nemo_dllm.collections.diffusion.training.metrics import DiffusionMetrics

    metrics = DiffusionMetrics()
    trainer = SimpleNamespace(max_steps=20, global_step=0, log_every_n_steps=1, callbacks=[object(), metrics])
    trainer.latest = metrics.latest
    return trainer


@pytest.fixture
def start(trainer, monkeypatch):
    """Starts the progress of a run, on a terminal or not."""
    from nemo_dllm.collections.diffusion.training.progress import RunProgress

    def run(terminal=False, **fields):
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setenv("TERM", "xterm")
        for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            monkeypatch.delenv(name, raising=False)
        if terminal:
            monkeypatch.setenv("FORCE_COLOR", "1")
        progress = RunProgress(**fields)
        progress.on_train_start(trainer, None)
        return progress

    return run


def train(progress, trainer, steps):
    for _ in range(steps):
        trainer.global_step += 1
        if trainer.global_step >= 4:
            trainer.latest.update({"train/loss": trainer.global_step / 8, "train/tokens_per_second": 12345.6})
        progress.on_train_batch_end(trainer, None, None, None, 0)


def test_plain_lines_without_a_terminal(start, trainer, capsys):
    train(start(plain_interval=0.25), trainer, 20)
    assert capsys.readouterr().out.splitlines() == [
        "step 5/20  loss 0.625  12,346 tokens/s",
        "step 10/20  loss 1.250  12,346 tokens/s",
        "step 15/20  loss 1.875  12,346 tokens/s",
        "step 20/20  loss 2.500  12,346 tokens/s",
    ]


def test_a_tenth_of_the_run_by_default_and_a_step_at_least(start, trainer, capsys):
    train(start(), trainer, 5)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["2/20", "4/20"]
    trainer.max_steps = 3
    progress = start()
    trainer.global_step = 0
    train(progress, trainer, 3)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1/3", "2/3", "3/3"]


def test_nothing_is_made_up_before_the_first_metrics(start, trainer, capsys):
    train(start(), trainer, 2)
    assert capsys.readouterr().out.split() == ["step", "2/20"]


@pytest.mark.parametrize(
    "max_steps, lines", [(25, ["10/25  loss 1.250", "20/25  loss 2.500", "25/25"]), (4, ["4/4"])], ids=str
)
def test_lines_where_metrics_are_new_and_at_the_end(start, trainer, capsys, max_steps, lines):
    trainer.log_every_n_steps, trainer.max_steps = 10, max_steps
    train(start(), trainer, max_steps)
    printed = [line.removesuffix("  12,346 tokens/s") for line in capsys.readouterr().out.splitlines()]
    assert printed == [f"step {line}" for line in lines]


def test_one_line_for_a_validation(start, trainer, capsys):
    progress = start()
    trainer.global_step = 7
    progress.on_validation_end(trainer, None)
    assert capsys.readouterr().out == ""
    trainer.latest["validation/nll_bound"] = 4.3216
    progress.on_validation_end(trainer, None)
    assert capsys.readouterr().out == "step 7: validation NLL bound 4.322 nats per token\n"
    trainer.latest["validation/bits_per_byte"] = 2.7184
    trainer.latest["validation/unigram_bits_per_byte"] = 3.5
    progress.on_validation_end(trainer, None)
    line = capsys.readouterr().out
    assert line.startswith("step 7: validation NLL bound 4.322 nats per token, 2.718 bits per byte")
    assert line.count("\n") == 1


def test_a_validation_outside_training_prints_nothing(trainer, capsys):
    from nemo_dllm.collections.diffusion.training.progress import RunProgress

    trainer.latest["validation/nll_bound"] = 4.0
    RunProgress().on_validation_end(trainer, None)
    assert capsys.readouterr().out == ""


def test_only_the_first_rank_prints(start, trainer, capsys):
    from nemo_dllm.collections.diffusion.training.progress import RunProgress

    quiet = RunProgress()
    quiet.disable()
    quiet.on_train_start(trainer, None)
    trainer.latest["validation/nll_bound"] = 4.0
    train(quiet, trainer, 20)
    quiet.on_validation_end(trainer, None)
    quiet.on_train_end(trainer, None)
    assert capsys.readouterr().out == ""
    quiet.enable()
    quiet.on_train_start(trainer, None)
    quiet.on_validation_end(trainer, None)
    assert "4.000" in capsys.readouterr().out


def test_without_the_metrics_callback(start, trainer, capsys):
    trainer.callbacks = []
    train(start(), trainer, 2)
    assert "loss" not in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["on_train_end", "on_exception"])
def test_a_bar_on_a_terminal(start, trainer, capsys, ending):
    progress = start(terminal=True)
    train(progress, trainer, 4)
    bar = progress._progress
    assert bar.live.is_started
    assert bar.tasks[0].completed == 4
    assert bar.tasks[0].total == 20
    assert bar.tasks[0].fields["state"] == "loss 0.500  12,346 tokens/s"
    trainer.latest["validation/nll_bound"] = 4.0
    progress.on_validation_end(trainer, None)
    arguments = (trainer, None) if ending == "on_train_end" else (trainer, None, KeyboardInterrupt())
    getattr(progress, ending)(*arguments)
    assert not bar.live.is_started
    out = capsys.readouterr().out
    assert "validation NLL bound 4.000" in out
    assert "step 4/20" not in out
    assert "\x1b[?25h" in out, "the cursor is back"


def test_a_resumed_run_starts_where_it_goes_on(start, trainer):
    trainer.global_step = 12
    assert start(terminal=True)._progress.tasks[0].completed == 12


def test_an_exception_before_training(trainer):
    from nemo_dllm.collections.diffusion.training.progress import RunProgress

    RunProgress().on_exception(trainer, None, ValueError())


def test_lines_of_a_real_run(straight):
    lines = straight["console"].splitlines()
    assert sum(line.startswith("step 12: validation NLL bound") for line in lines) == 1
    assert sum(line.startswith("step 12/12  loss ") for line in lines) == 1


def test_a_finished_run_says_that_nothing_is_left(trainer, start, capsys):
    from nemo_dllm.collections.diffusion.training.progress import RunProgress

    trainer.global_step = 20
    RunProgress().on_fit_end(trainer, None)
    assert capsys.readouterr().out.startswith("nothing to do: step 20 of trainer.max_steps=20 is reached; raise")
    start().on_fit_end(trainer, None)
    assert capsys.readouterr().out == ""
