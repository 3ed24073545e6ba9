"""Launching: what nemo_run makes of a recipe, on this machine and on a cluster that is not there."""

import io
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nemo


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Everything that nemo_run would hand over for a recipe and an executor; returns (script of Slurm, experiment)."""
    import nemo_run as run

    from nemo_dllm.recipes.executors import FitToTrainer

    # nemo_run makes folders with a command that would read pytest's.
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path))

    def prepare(recipe, executor):
        with run.Experiment("launch", executor=executor, log_level="ERROR") as experiment:
            experiment.add(recipe, plugins=[FitToTrainer()], name="job")
            experiment.dryrun(log=False, delete_exp_dir=False)
        scripts = list((tmp_path / "experiments" / "launch").glob("*/job_sbatch.sh"))
        return scripts[0].read_text() if scripts else None, experiment

    return prepare


def slurm_executor(**fields):
    import fiddle as fdl

    from nemo_dllm.recipes.executors import slurm

    config = slurm()
    for field, value in {"account": "research", "partition": "gpu", **fields}.items():
        setattr(config, field, value)
    return fdl.build(config)


def flags_of(script):
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script, re.MULTILINE))


def command_of(script):
    """The words of the srun call that trains."""
    (line,) = [line for line in script.splitlines() if line.startswith("srun --output")]
    return shlex.split(line)


@pytest.fixture
def two_nodes(recipes):
    """A recipe of two nodes with eight GPUs each, that writes to a shared folder."""
    recipe = recipes["qwen3_30b_a3b_mdlm_pretrain"]
    recipe.log.log_dir = "/shared/runs"
    assert (recipe.trainer.num_nodes, recipe.trainer.devices) == (2, 8)
    return recipe


def test_a_slurm_job_has_the_nodes_and_gpus_of_the_trainer(prepared, two_nodes):
    script, _ = prepared(two_nodes, slurm_executor(time="12:00:00", gpus_per_node=4, nodes=7))
    flags = flags_of(script)
    expected = {"nodes": "2", "ntasks-per-node": "8", "gpus-per-node": "8", "exclusive": ""}
    assert {name: flags[name] for name in expected} == expected
    expected = {"account": "research", "partition": "gpu", "time": "12:00:00", "signal": "TERM@300"}
    assert {name: flags[name] for name in expected} == expected
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert "export TORCH_NCCL_AVOID_RECORD_STREAMS=1\n" in script
    command = command_of(script)
    assert command[command.index("python") :][:5] == ["python", "-m", "nemo_run.core.runners.fdl_runner", "-n", "job"]


def test_a_slurm_job_of_torchrun_starts_one_on_each_node(prepared, two_nodes):
    script, _ = prepared(two_nodes, slurm_executor(launcher="torchrun"))
    assert {name: flags_of(script)[name] for name in ("nodes", "ntasks-per-node", "gpus-per-node")} == {
        "nodes": "2",
        "ntasks-per-node": "1",
        "gpus-per-node": "8",
    }
    command = command_of(script)
    torchrun = command[command.index("torchrun") :]
    options = dict(zip(torchrun[1::2], torchrun[2::2], strict=False))
    expected = {"--nnodes": "2", "--nproc-per-node": "8", "--node-rank": "$SLURM_NODEID", "--rdzv-backend": "c10d"}
    assert {name: options[name] for name in expected} == expected
    assert options["--rdzv-endpoint"] == "$head_node_ip:29500"
    assert "head_node_ip=$(srun --nodes=1 --ntasks=1" in script


def test_a_slurm_job_in_a_container(prepared, two_nodes):
    mounts = {"container_image": "registry/dllm:1", "container_mounts": ["/shared:/shared"]}
    script, _ = prepared(two_nodes, slurm_executor(**mounts, env_vars={"HF_HOME": "/shared/hub"}))
    command = command_of(script)
    assert command[command.index("--container-image") + 1] == "registry/dllm:1"
    mounted = command[command.index("--container-mounts") + 1].split(",")
    assert mounted[0] == "/shared:/shared"
    assert mounted[1].endswith("/job:/nemo_run")
    assert "export HF_HOME=/shared/hub\n" in script
    assert command[-1] == "/nemo_run/configs/job_fn_or_script"


def test_what_a_job_runs_is_the_recipe(prepared, two_nodes):
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    two_nodes.trainer.max_steps = 77
    script, _ = prepared(two_nodes, slurm_executor())
    # Without a container the path is that on the cluster, here the same machine.
    file = Path(command_of(script)[-1])
    assert ZlibJSONSerializer().deserialize(file.read_text()) == two_nodes


def test_every_recipe_survives_the_way_to_a_job(recipes):
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    serializer = ZlibJSONSerializer()
    for name, recipe in recipes.items():
        assert serializer.deserialize(serializer.serialize(recipe)) == recipe, name


@pytest.mark.parametrize("exit_code, restarts, requeued", [(143, 0, True), (143, 3, False), (0, 0, False)])
def test_a_job_told_to_end_is_queued_again(prepared, two_nodes, tmp_path, exit_code, restarts, requeued):
    """The script runs, on commands that stand in for Slurm's: training exits with 143 once it has saved."""
    script, _ = prepared(two_nodes, slurm_executor())
    commands = tmp_path / "commands"
    commands.mkdir()
    stand_ins = {
        "scontrol": f'echo "$@" >> {commands}/asked; if [ "$1" = show ]; then echo node1; fi',
        "srun": f'case "$*" in *hostname*) echo 10.0.0.1;; *) exit {exit_code};; esac',
    }
    for name, body in stand_ins.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(stat.S_IRWXU)
    environment = {"PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "42"}
    environment["SLURM_RESTART_COUNT"] = str(restarts)
    done = subprocess.run(["bash"], input=script, text=True, env=environment, capture_output=True, timeout=300)
    assert done.returncode == exit_code, done.stderr
    assert ("requeue 42" in (commands / "asked").read_text()) == requeued


def test_a_cluster_with_gpus_of_another_name(prepared, two_nodes):
    script, _ = prepared(two_nodes, slurm_executor(gres="gpu:h100:8"))
    assert flags_of(script)["gres"] == "gpu:h100:8"
    assert "gpus-per-node" not in flags_of(script)


def test_a_local_run_has_the_processes_of_the_trainer(prepared, tiny):
    import fiddle as fdl

    from nemo_dllm.recipes.executors import local

    tiny.trainer.devices = 3
    _, experiment = prepared(tiny, fdl.build(local()))
    (job,) = experiment.jobs
    role = job._executable.roles[0]
    assert role.entrypoint == "torchrun"
    assert role.args[role.args.index("--nproc-per-node") + 1] == "3"
    assert role.args[role.args.index("--nnodes") + 1] == "1"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_the_launcher_ends_what_it_launched(tiny, number):
    """In a session of its own, as nemo_run starts torchrun; where nothing runs, all is as before."""
    import fiddle as fdl

    from nemo_dllm.recipes.executors import PASSED_ON, FitToTrainer, local

    received, before = [], {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(number, lambda *_: received.append(number))
        FitToTrainer().setup(tiny, fdl.build(local()))
        with subprocess.Popen(["sleep", "300"], start_new_session=True) as launched:
            signal.raise_signal(number)
            assert launched.wait(timeout=60) == -number
        assert (received, PASSED_ON) == ([], [number])
        signal.raise_signal(number)
        assert received == [number]
    finally:
        PASSED_ON.clear()
        for each, handler in before.items():
            signal.signal(each, handler)


@pytest.mark.parametrize("folder", [None, "runs"])
def test_a_folder_that_the_next_job_would_not_find(prepared, two_nodes, folder):
    two_nodes.log.log_dir = folder
    with pytest.raises(ValueError, match=rf"^log.log_dir={folder} lies in a folder of this job alone, .* dir='/shared"):
        prepared(two_nodes, slurm_executor())


@pytest.mark.parametrize("devices, number", [(4, 4), ("4", 4), ([0, 2], 2), ("0,2", 2), ("auto", None), (-1, None)])
def test_the_number_of_devices_has_to_be_known(tiny, devices, number):
    from nemo_dllm.recipes.executors import number_of_devices

    tiny.trainer.devices = devices
    if number is not None:
        assert number_of_devices(tiny.trainer) == number
        return
    with pytest.raises(ValueError, match=f"^trainer.devices={devices!r} is a number only where the GPUs are"):
        number_of_devices(tiny.trainer)


@pytest.mark.parametrize("fsdp", [None, "megatron"])
def test_a_fully_sharded_run_has_all_connections(prepared, two_nodes, fsdp):
    two_nodes.trainer.strategy.fsdp = fsdp
    script, _ = prepared(two_nodes, slurm_executor())
    assert ("export CUDA_DEVICE_MAX_CONNECTIONS=1\n" in script) == (fsdp is None)


def test_tasks_of_others_keep_their_executor():
    import nemo_run as run
    from nemo.collections import llm

    from nemo_dllm.recipes.executors import FitToTrainer

    executor = run.LocalExecutor(ntasks_per_node=5)
    FitToTrainer().setup(run.Partial(llm.pretrain, trainer=run.Config(dict, devices=2, num_nodes=1)), executor)
    FitToTrainer().setup(run.Script(inline="true"), executor)
    assert executor.ntasks_per_node == 5


def test_the_nemo_command_knows_the_executors_and_fits_them():
    import nemo_run as run
    from nemo.collections import llm
    from nemo_run.cli.api import RunContext

    from nemo_dllm.recipes.executors import FitToTrainer

    context = RunContext(name="pretrain")
    context.plugins = llm.pretrain.cli_entrypoint.default_plugins
    fields = {"account": "research", "partition": "gpu", "time": "01:30:00", "retries": "9"}
    context.parse_args(["executor=slurm", *(f"executor.{field}={value}" for field, value in fields.items())])
    assert isinstance(context.executor, run.SlurmExecutor)
    assert (context.executor.account, context.executor.time, context.executor.retries) == ("research", "01:30:00", 9)
    assert context.plugins == [FitToTrainer()]
    assert llm.finetune.cli_entrypoint.default_plugins == llm.pretrain.cli_entrypoint.default_plugins


@pytest.mark.slow
def test_two_processes_however_started_train_as_one(tmp_path):
    """By torchrun through nemo_run, and by Lightning, which starts the second itself."""
    (tmp_path / "text.txt").write_text("\n".join(f"line {i} holds {i * i} and {i % 7}" for i in range(600)))
    fields = {"data.vocab_size": 300, "data.seq_length": 16, "data.micro_batch_size": 2, "data.global_batch_size": 4}
    fields |= {"data.num_val_rows": 8, "data.cache_dir": "cache", "model.config.num_layers": 2}
    fields |= {"trainer.max_steps": 4, "trainer.val_check_interval": 4, "trainer.log_every_n_steps": 1}
    environment = os.environ | {"NEMORUN_HOME": str(tmp_path / "nemo_run"), "CUDA_VISIBLE_DEVICES": ""}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"

    def losses(name, *more):
        command = [
            "nemo-dllm",
            "pretrain",
            "--factory",
            f"mdlm_tiny(path='{tmp_path}/text.txt', dir='{tmp_path}/{name}')",
        ]
        command += [*(f"{field}={value}" for field, value in fields.items()), *more]
        options = {"cwd": tmp_path, "env": environment, "stdin": subprocess.DEVNULL, "timeout": 600}
        done = subprocess.run(command, capture_output=True, text=True, **options)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        found = re.findall(r"step (\d)/4 +loss ([\d.]+)", done.stdout + done.stderr)
        return {int(step): float(loss) for step, loss in found}

    one = losses("one")
    assert sorted(one) == [1, 2, 3, 4]
    for name, *more in (("torchrun", "trainer.devices=2", "run.executor=local"), ("lightning", "trainer.devices=2")):
        two = losses(name, *more)
        # Printed to three digits.
        assert two == pytest.approx(one, abs=2e-3), name


def test_another_number_of_processes_than_the_trainer_asks_for():
    from types import SimpleNamespace

    from nemo_dllm.recipes.tasks import check_settings

    trainer = SimpleNamespace(num_devices=2, num_nodes=1, world_size=4, strategy=None)
    message = "^trainer.devices=2 and trainer.num_nodes=1 ask for 2 processes, 4 have been started; set them to what"
    with pytest.raises(ValueError, match=message):
        check_settings(SimpleNamespace(config=None), None, trainer)
