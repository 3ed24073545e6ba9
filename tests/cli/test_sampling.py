"""The table that both command lines are made of."""

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_dllm.cli.sampling import COMMANDS, REQUIRED, Command, Option, sampler_options
from nemo_dllm.collections.diffusion.sampling import sampler_fields

MODEL = str(Path(__file__).parents[1] / "golden" / "models" / "a2d_qwen3")


def test_sampler_settings_are_those_of_the_sampler():
    """Read from the source of the class, without torch: every name, type, default and text."""
    read = {option.name: option[:2] + (option.default, option.help) for option in sampler_options()}
    assert read == {name: (name, field.type, field.default, field.help) for name, field in sampler_fields().items()}


@pytest.mark.nemo
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_commands_have_functions_that_take_their_options(command):
    function = getattr(import_module(f"nemo_dllm.{command.module}"), command.name)
    names = [option.name for option in command.own] + (["settings"] if command.samples else [])
    assert sorted(inspect.signature(function).parameters) == sorted(names)
    assert set(command.alternatives) <= set(names)


def test_serving_has_the_defaults_of_its_function():
    (command,) = (command for command in COMMANDS if command.name == "serve")
    parameters = inspect.signature(import_module(f"nemo_dllm.{command.module}").serve).parameters
    options = {option.name: option.default for option in command.own if option.default is not REQUIRED}
    assert options == {name: parameters[name].default for name in options}


class Recorder:
    """Stands for a module with one command."""

    def speak(self, **arguments):
        self.arguments = arguments


def test_what_is_given_reaches_the_function():
    own = (Option("path", str, "", REQUIRED), Option("loud", bool, "", False))
    recorder, loaded = Recorder(), []

    def load(name):
        loaded.append(name)
        return recorder

    Command("speak", "", "somewhere", own).run({"path": MODEL, "top_k": None, "steps": 3}, load)
    assert loaded == ["nemo_dllm.somewhere"]
    # A setting is handed on where it is given, also as None, which a preset may not be.
    assert recorder.arguments == {"path": MODEL, "loud": False, "settings": {"top_k": None, "steps": 3}}
    Command("speak", "", "somewhere", own, samples=False).run({"path": MODEL, "loud": True}, load)
    assert recorder.arguments == {"path": MODEL, "loud": True}
    twins = Command("speak", "", "somewhere", own, alternatives=("path", "loud"))
    with pytest.raises(ValueError, match=f"path={MODEL} and loud=True are given; give one of them"):
        twins.run({"path": MODEL, "loud": True}, load)


def test_settings_are_checked_before_anything_is_loaded():
    def run(**given):
        own = (Option("path", str, "", REQUIRED), Option("preset", str, ""))
        Command("speak", "", "somewhere", own).run({"path": MODEL, **given}, lambda _: pytest.fail("loaded"))

    with pytest.raises(ValueError, match="preset='drem' is unknown"):
        run(preset="drem")
    # What the checkpoint brings along is not missed.
    with pytest.raises(ValueError, match="top_k=0 must be at least 1"):
        run(top_k=0, cache="exact", steps_per_block=4, stop_strings=["a"])


@pytest.mark.parametrize(
    "error, value, message",
    [
        (FileNotFoundError, "nosuch.txt", "prompt_file=nosuch.txt does not exist; name a file that is there"),
        (IsADirectoryError, MODEL, f"prompt_file={MODEL} is a folder; name a file"),
    ],
)
def test_files_are_looked_for_before_anything_is_loaded(error, value, message):
    (generate,) = (command for command in COMMANDS if command.name == "generate")
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        generate.run({"path": MODEL, "prompt_file": value}, lambda _: pytest.fail("loaded"))


def test_the_steps_of_infilling_are_not_those_of_a_continuation():
    (infill,) = (command for command in COMMANDS if command.name == "infill")
    ran = []
    given = {"path": MODEL, "text": "a <mask:300>", "steps": 200, "min_new_tokens": 200}
    infill.run(given, lambda _: SimpleNamespace(infill=lambda **arguments: ran.append(arguments)))
    assert ran[0]["settings"] == {"steps": 200, "min_new_tokens": 200}
    with pytest.raises(ValueError, match="steps=0 must be from 1"):
        infill.run(given | {"steps": 0}, lambda _: pytest.fail("loaded"))


def test_the_page_names_options_that_there_are():
    page = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()
    commands = {command.name: {option.name for option in command.options} for command in COMMANDS}
    lines = re.findall(r"^nemo-dllm (\w+) (.*)$", page, re.MULTILINE)
    assert {"generate", "infill", "chat", "evaluate"} <= {name for name, _ in lines} <= set(commands)
    for name, rest in lines:
        used = {option.replace("-", "_") for option in re.findall(r"(?<!\S)--([\w-]+)", rest)}
        assert used <= commands[name]


def test_help_shows_whole_names_on_a_terminal_of_80_columns(monkeypatch, capsys):
    from nemo_dllm.cli.main import main

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["nemo-dllm", "generate", "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    shown = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    (command,) = (command for command in COMMANDS if command.name == "generate")
    names = {f"--{option.name.replace('_', '-')}" for option in command.options if option.name != "path"}
    assert names <= shown


def test_columns_are_a_mapping(monkeypatch):
    from nemo_dllm.cli import main as cli

    called = []
    monkeypatch.setattr(cli, "_import", lambda *_: SimpleNamespace(evaluate=lambda **given: called.append(given)))
    typed = ["hf://owner/name", "--column", "prompt=question", "--column", "completion=the=answer"]
    monkeypatch.setattr(sys, "argv", ["nemo-dllm", "evaluate", MODEL, *typed])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert called[0]["data"] == "hf://owner/name"
    assert called[0]["columns"] == {"prompt": "question", "completion": "the=answer"}
    monkeypatch.setattr(sys, "argv", ["nemo-dllm", "evaluate", MODEL, __file__])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert called[1]["columns"] is None
