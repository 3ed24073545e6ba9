"""The `nemo-dllm` command: light, so that `--help` answers at once."""
