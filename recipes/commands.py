"""Our own commands under ``nemo dllm``, and what the ``nemo`` command needs to read our recipes' arguments."""

import types

from nemo_run.cli.cli_parser import type_parser

# nemo_run reads Optional[str], but not str | None, which is how the fields here are declared.
type_parser.register_parser(types.UnionType)(type_parser.parse_union)
