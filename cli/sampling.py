"""The commands that sample from a model and judge it, as data: both command lines are made of it.

It imports nothing but the standard library, so that ``nemo-dllm --help`` is quick. Sampler settings are read from the
source of ``SamplerConfig``, which is the only place that lists them.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

SAMPLER_SOURCE = Path(__file__).parents[1] / "collections" / "diffusion" / "sampling" / "config.py"
REQUIRED = inspect.Parameter.empty


class Option(NamedTuple):
    """A parameter of a command.

    Attributes:
        name: as of a Python argument.
        type: an annotation: a type, one ``| None``, a tuple of one, or ``dict[str, str] | None``.
        help: what it does.
        default: what it is if nothing is said; ``REQUIRED`` is for arguments that have to be given.
        exists: whether it names a file or folder that has to exist.
        of_sampler: whether it is a field of ``SamplerConfig``.
        hub: whether ``hf://NAME`` on the Hugging Face Hub will do in place of what exists.
    """

    name: str
    type: Any
    help: str
    default: Any = None
    exists: bool = False
    of_sampler: bool = False
    hub: bool = False


@dataclass(frozen=True)
class Command:
    """A command of ``nemo-dllm`` and ``nemo dllm``.

    Attributes:
        name: of the command.
        summary: one sentence.
        module: of this package; it has a function of the command's name, which takes the options.
        own: its options, without the sampler's.
        samples: whether it takes sampler settings, and hands those that are given on as ``settings``.
        alternatives: options of which at most one may be given.
        fills_gaps: whether gaps decide on how many tokens there are, and so on how many steps.
    """

    name: str
    summary: str
    module: str
    own: tuple[Option, ...]
    samples: bool = True
    alternatives: tuple[str, ...] = ()
    fills_gaps: bool = False

    @property
    def options(self) -> tuple[Option, ...]:
        """All of them."""
        return (*self.own, *(sampler_options() if self.samples else ()))

    def run(self, given: Mapping[str, Any], load: Callable[[str], Any] = importlib.import_module) -> None:
        """Run the command.

        Args:
            given: values of the options that the user has named, and of those that are required.
            load: imports a module by its absolute name.

        Raises:
            FileNotFoundError, NotADirectoryError, ValueError: where the path is of no checkpoint, see
                ``checkpoint_kind``.
            FileNotFoundError, IsADirectoryError: where an option names a file that is not there, or a folder.
            ValueError: for options that exclude each other, and sampler settings that no checkpoint can mend.
        """
        check_alternatives(self, given)
        check_checkpoint(given["path"], best=given.get("best", False))
        self._check_files(given)
        of_sampler = {option.name for option in self.options if option.of_sampler}
        settings = {name: value for name, value in given.items() if name in of_sampler}
        if settings or given.get("preset"):
            _check_settings(given.get("preset"), settings, self.fills_gaps)
        arguments = {option.name: given.get(option.name, option.default) for option in self.own}
        if self.samples:
            arguments["settings"] = settings
        getattr(load(f"nemo_dllm.{self.module}"), self.name)(**arguments)

    def _check_files(self, given: Mapping[str, Any]) -> None:
        for option in self.own:
            value = given.get(option.name)
            if option.hub and not value.startswith("hf://") and not Path(value).exists():
                raise FileNotFoundError(
                    f"{option.name}={value} does not exist; name a file or folder that is there, or hf://NAME of the "
                    "Hugging Face Hub"
                )
            if not option.exists or option.default is REQUIRED or value is None:
                continue
            if Path(value).is_dir():
                raise IsADirectoryError(f"{option.name}={value} is a folder; name a file")
            if not Path(value).exists():
                raise FileNotFoundError(f"{option.name}={value} does not exist; name a file that is there")


def check_checkpoint(path: str | Path, *, best: bool = False) -> None:
    """Check what the names in a folder tell about the checkpoint that is asked for, without NeMo.

    Raises:
        FileNotFoundError, NotADirectoryError, ValueError: see ``checkpoint_kind``.
    """
    folders = importlib.import_module("nemo_dllm.collections.diffusion.checkpoint_folder")
    folders.checkpoint_kind(path, best=best)


def check_alternatives(command: Command, given: Mapping[str, Any]) -> None:
    """Check that options which exclude each other are not all there.

    Raises:
        ValueError: names them.
    """
    both = [name for name in command.alternatives if given.get(name) not in (None, "")]
    if len(both) > 1:
        named = [f"{name}={given[name]}" for name in both]
        raise ValueError(f"{' and '.join(named)} are given; give one of them")


def _check_settings(preset: str | None, settings: Mapping[str, Any], fills_gaps: bool) -> None:
    """Check what can be told before the checkpoint is loaded, which takes long, and without NeMo."""
    sampling = importlib.import_module("nemo_dllm.collections.diffusion.sampling")
    if preset is not None:
        sampling.preset_fields(preset)
    of_checkpoint = {"block_size": settings.get("steps_per_block") or 1, "eos_token_id": 0}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    given = sampling.settings_of_gaps(given, tokens=1) if fills_gaps else given
    sampling.SamplerConfig(**(of_checkpoint | given))


def sampler_options() -> tuple[Option, ...]:
    """The fields of ``SamplerConfig`` that a user may set: what ``sampling.sampler_fields`` says, without torch."""
    module = ast.parse(SAMPLER_SOURCE.read_text())
    config = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "SamplerConfig")
    attributes = ast.get_docstring(config).split("Attributes:\n", 1)[1]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    texts = {name: " ".join(text.replace("``", "").split()) for name, text in entries}
    fields = [node for node in config.body if isinstance(node, ast.AnnAssign) and node.target.id != "quirks"]
    return tuple(
        Option(
            field.target.id,
            _annotation(field.annotation),
            texts[field.target.id],
            default=ast.literal_eval(field.value),
            of_sampler=True,
        )
        for field in fields
    )


def _annotation(node: ast.expr) -> Any:
    # Builtin types only, as in ``int | None`` and ``tuple[str, ...]``.
    return eval(compile(ast.Expression(node), str(SAMPLER_SOURCE), "eval"), {})


_PATH = Option("path", Path, "Folder of a run, a NeMo checkpoint or a Hugging Face checkpoint.", REQUIRED, exists=True)
_BEST = Option("best", bool, "Of a run, the checkpoint of the best validation.", False)
_PRESET = Option("preset", str | None, "Settings that belong together (default: what suits the checkpoint).")
_WATCH = Option("watch", bool | None, "Show the text as it forms (default: on a terminal).")
_REPLAY = Option("replay", Path | None, "Write an HTML page (.html) or a picture (.gif) that plays the denoising.")

COMMANDS: Sequence[Command] = (
    Command(
        "generate",
        "Continue texts with a trained model.",
        "collections.diffusion.inference.text",
        (
            _PATH,
            Option("prompt", str, "Text to go on from.", ""),
            Option(
                "prompt_file", Path | None, "A text to go on from, or with .jsonl a prompt per line.", None, exists=True
            ),
            Option("output", Path | None, "JSONL file to write, a line per text (default: print the text)."),
            Option("num_samples", int, "Texts per prompt.", 1),
            Option("batch_size", int, "Texts generated at a time.", 8),
            Option("stream", bool, "Print text as soon as it can no longer change.", False),
            _WATCH,
            _REPLAY,
            _BEST,
            _PRESET,
        ),
        alternatives=("prompt", "prompt_file"),
    ),
    Command(
        "infill",
        "Fill in the marked parts of a text, or what is missing between two texts.",
        "collections.diffusion.inference.infilling",
        (
            _PATH,
            Option("text", str | None, "Text with <mask> or <mask:LENGTH> for what is missing."),
            Option("text_file", Path | None, "File with such a text.", None, exists=True),
            Option("prefix", str | None, "Text before what is missing; with suffix, in place of a text with marks."),
            Option("suffix", str, "Text after it.", ""),
            Option(
                "length", int, "Tokens that a <mask> without a length stands for, or between prefix and suffix.", 16
            ),
            _WATCH,
            _REPLAY,
            _BEST,
            _PRESET,
        ),
        alternatives=("text", "text_file", "prefix"),
        fills_gaps=True,
    ),
    Command(
        "chat",
        "Talk with a model, in its own chat template; answers are shown while they form.",
        "collections.diffusion.inference.chat",
        (
            _PATH,
            Option("system", str | None, "What the model is told beforehand."),
            Option("chat_template", Path | None, "File with a Jinja template (default: the tokenizer's).", None, True),
            Option("template_variables", str | None, 'Its variables, as JSON, such as {"enable_thinking": false}.'),
            _WATCH,
            _REPLAY,
            _BEST,
            _PRESET,
        ),
    ),
    Command(
        "evaluate",
        "Bound the perplexity of a model on a text, under noise that is the same for every model.",
        "collections.diffusion.inference.evaluate",
        (
            _PATH,
            Option(
                "data",
                str,
                "Text file or folder of them, or rows as for training (.jsonl, .parquet, hf://NAME): texts or chats.",
                REQUIRED,
                hub=True,
            ),
            Option("text_field", str, "Field or column with the text of a row.", "text"),
            Option(
                "columns", dict[str, str] | None, "What a field of chats is called in the data, as prompt=question."
            ),
            Option("split", str | None, "Of datasets with several splits."),
            Option(
                "chat_template",
                str | None,
                "Of chats: Jinja text, or file with it; '' joins prompt and answer (default: tokenizer's).",
            ),
            Option("max_bad_rows", int, "Rows that cannot be used before it gives up.", 0),
            Option("seq_length", int | None, "Tokens per row (default: of the training samples, at most 2048)."),
            Option("batch_size", int, "Rows at a time.", 8),
            Option("num_draws", int, "Noise levels per row; more are more exact.", 4),
            Option("max_rows", int | None, "Take so many rows only."),
            Option("seed", int, "Of the noise.", 1234),
            Option("json", bool, "Print the result as JSON.", False),
            _BEST,
        ),
        samples=False,
    ),
    Command(
        "serve",
        "Serve a model under OpenAI's API, with a page to watch it at.",
        "collections.diffusion.serving.server",
        (
            _PATH,
            Option("host", str, "Address to listen at; the default is for this machine alone.", "127.0.0.1"),
            Option("port", int, "Port to listen at; 0 takes a free one.", 8000),
            Option("name", str | None, "What clients call the model (default: the name of the folder)."),
            Option("api_key", str | None, "What clients have to send (better: NEMO_DLLM_API_KEY in the environment)."),
            Option("chat_template", Path | None, "File with a Jinja template (default: the tokenizer's).", None, True),
            Option("max_batch_rows", int, "Completions that are denoised together.", 16),
            Option("max_batch_tokens", int, "Positions of a batch, padding included.", 16_384),
            Option("max_waiting_rows", int, "Completions in the queue; beyond it requests get status 429.", 256),
            Option("max_rows_per_request", int, "Prompts times samples of a request.", 16),
            Option("max_completion_tokens", int, "Tokens per completion that requests may ask for.", 1_024),
            Option("max_body_bytes", int, "Size of a request.", 1_000_000),
            Option("timeout_seconds", float, "From a request's arrival to its last token.", 300.0),
            Option("shutdown_seconds", float, "For running requests to end when the server is told to stop.", 30.0),
            _BEST,
            _PRESET,
        ),
    ),
)
