"""What goes to standard output: results alone, so that they can be piped."""

import json
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.nemo

# It names no block size, which is said.
MODEL = Path(__file__).parents[1] / "golden" / "models" / "sdar_moe"
SAID = "config.json names no block_size; that of family sdar_moe is used, 4"


@pytest.fixture
def run(forks, tmp_path):
    """Runs a command in a process of its own: exit code, standard output and standard error."""

    def run(program, *arguments):
        files = {name: tmp_path / name for name in ("out", "err")}
        job = {"program": program, "arguments": [str(argument) for argument in arguments], **files}
        script = str(Path(__file__).with_name("run_command.py"))
        process = forks.Process(target=runpy.run_path, args=(script, {"job": job}, "__main__"))
        process.start()
        process.join(300)
        return process.exitcode, *(file.read_text() for file in files.values())

    return run


@pytest.mark.parametrize("program, command", [("nemo-dllm", []), ("nemo", ["dllm"])])
def test_json_is_alone_on_standard_output(run, tmp_path, program, command):
    text, prompts = tmp_path / "text.txt", tmp_path / "prompts.jsonl"
    text.write_text("w5 w7 w9")
    prompts.write_text('{"prompt": "w5"}\n{"prompt": "w7"}\n')
    code, out, err = run(program, *command, "evaluate", MODEL, text, "--json", "--num-draws", "1")
    assert code == 0 and json.loads(out)["tokens"] == 3 and SAID in err
    code, out, err = run(program, *command, "generate", MODEL, "--prompt-file", prompts, "--max-new-tokens", "4")
    assert code == 0 and [json.loads(line)["prompt"] for line in out.splitlines()] == ["w5", "w7"] and SAID in err
