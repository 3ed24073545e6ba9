import subprocess
import sys

CODE = """
import sys
import nemo_dllm.collections.diffusion.data as data
for name in data.__all__:
    getattr(data, name)
print(sorted({"nemo", "megatron", "lightning", "transformers"} & set(sys.modules)))
"""


def test_package_needs_no_nemo():
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
