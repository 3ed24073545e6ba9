"""What runs on a machine without the packages of the extra ``serve``, and without clients."""

import subprocess
import sys
from pathlib import Path

import pytest

import nemo_dllm.collections.diffusion.serving as serving

SCRIPT = """
import runpy, sys
absent = {"openai", "httpx", "httpx_sse", "fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"}

class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent)
toys = runpy.run_path(sys.argv[1])
from nemo_dllm.collections.diffusion import serving
from nemo_dllm.collections.diffusion.serving.engine import BatchingEngine
model, updates = toys["ToyModel"](), []
served = serving.ServedModel(model, "toy")
fixed = dict(mask_token_id=model.mask_token_id, device=model.device, decode=model.decode)
engine = BatchingEngine(model.denoiser, **fixed, limits=serving.ServerLimits())
engine.start()
row = serving.Row([1, 2], [], 3, served.default_config, 0, 0, updates.append)
engine.submit([row])
toys["until"](lambda: row.done)
engine.close()
assert len(updates[-1].tokens) == 3 and updates[-1].error is None, updates
try:
    serving.create_app
except ModuleNotFoundError as error:
    assert error.name in absent, error
else:
    raise AssertionError("the web application needs them")
"""


def test_the_engine_and_its_toys_need_no_web_packages():
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(Path(__file__).with_name("conftest.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_name_of_the_package_is_there():
    assert all(getattr(serving, name).__name__ == name for name in serving.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Server'"):
        serving.Server  # noqa: B018
