"""``python -m nemo_dllm.cli``."""

from nemo_dllm.cli.main import main

if __name__ == "__main__":
    main()
