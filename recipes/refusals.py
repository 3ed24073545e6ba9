"""``nemo llm pretrain`` and ``finetune`` refuse a recipe once, where each process of a run finds the same fault."""

from collections.abc import Callable

import nemo_run as run
from nemo.collections import llm
from nemo_run.cli.api import RunContext

from nemo_dllm.cli.errors import is_for_users, is_of_building, refused_once


class RefuseOnce(RunContext):
    """nemo_run's context, in which the first process of a run says what is wrong with a recipe; others exit with 1.

    What a run raises later on, any process says.
    """

    def parse_fn(self, fn: Callable, args: list[str], **defaults: object) -> run.Partial:
        """Read recipe and overrides."""
        with refused_once(is_for_users):
            return super().parse_fn(fn, args, **defaults)

    def _execute_task(self, fn: Callable, task_args: list[str]) -> None:
        with refused_once(is_of_building):
            super()._execute_task(fn, task_args)


for _task in (llm.pretrain, llm.finetune):
    _task.cli_entrypoint.run_ctx_cls = RefuseOnce
