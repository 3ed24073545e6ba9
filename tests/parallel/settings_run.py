"""One rank of a run whose settings are refused, as the global ``job`` asks, a dict; its console is a file."""

import os
import sys


def main(folder, rank, ranks, edits):
    console = os.open(f"{folder}/console{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(console, 1)
    os.dup2(console, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", RANK=str(rank), WORLD_SIZE=str(ranks))
    import fiddle as fdl

    from nemo_dllm.recipes.tiny import mdlm_tiny

    recipe = mdlm_tiny(dir=folder)
    recipe.trainer.devices = ranks
    for field, value in edits.items():
        *path, name = field.split(".")
        target = recipe
        for part in path:
            target = getattr(target, part)
        setattr(target, name, value)
    fdl.build(recipe)()


if __name__ == "__main__":
    main(**job)  # noqa: F821
