"""Sampling of a shape with random weights: one forward of the canvas, a step with a cache, and the sampler around it.

    python benchmarks/sample.py sdar_8b --batch 1 128 --context 1024

Times stand beside the roofline: the larger of bytes over bandwidth and operations over throughput, of one pass. Bytes
are the weights that it reads, keys and values of what it attends to, and the logits it writes. Tokens per second are
the sampler's, the prompt's encoding included, with a fixed number of tokens committed by each forward, as a trained
model would by its confidence, and with passes that earlier runs have recorded; the first run is told beside it. Of one
row they are those of the median of five runs. Overhead is the share of the time outside of the model.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from operator import itemgetter

from nemo_dllm.console import import_nemo_quietly

import_nemo_quietly()

import torch  # noqa: E402
from sample_models import SHAPES, build  # noqa: E402

from nemo_dllm.collections.diffusion.inference import MegatronDenoiser  # noqa: E402
from nemo_dllm.collections.diffusion.sampling import GenerateResult, SamplerConfig, generate  # noqa: E402
from nemo_dllm.collections.diffusion.training.flops import H200_BF16_FLOPS  # noqa: E402

# Of one NVIDIA H200, as its data sheet says.
H200_BYTES_PER_SECOND = 4.8e12
COMMITTED = (1, 2, 4)
ROUNDS = 5
COLUMNS = ("shape", "rows", "what", "ms", "roofline ms", "of roofline", "bound by", "GB", "TFLOP")
COLUMNS += ("tokens/s", "forwards", "tokens per forward and row", "s", "first s", "overhead")
CANVAS_BLOCK = 32  # Positions per semi-autoregressive block of models without blocks.


class Clock:
    """Seconds of work on the device, without waiting for it at each mark."""

    def __init__(self):
        self._spans: list[tuple] = []

    def __call__(self, work: Callable, *arguments, **named):
        """Do the work, timed."""
        start = self._mark()
        result = work(*arguments, **named)
        self._spans.append((start, self._mark()))
        return result

    def seconds(self) -> list[float]:
        """Of each piece of work."""
        if not torch.cuda.is_available():
            return [end - start for start, end in self._spans]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in self._spans]

    @staticmethod
    def _mark():
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class TimedDenoiser:
    """A denoiser whose passes are timed."""

    def __init__(self, model: MegatronDenoiser):
        self.clock, self.new_cache, self.nearly_done = Clock(), model.new_cache, model.nearly_done
        self.vocabulary_size = model.vocabulary_size
        for name in ("score_positions", "denoise", "commit", "score_and_keep", "commit_and_score"):
            setattr(self, name, partial(self.clock, getattr(model, name)))


def pass_cost(core, rows: int, positions: int, keys: int, scored: int) -> tuple[float, float]:
    """Bytes that a pass moves, and its floating-point operations.

    Args:
        core: the model.
        rows: of the batch.
        positions: of a row that go through the layers.
        keys: that each of them sees.
        scored: positions of a row with logits.
    """
    config, head_size = core.config, core.config.kv_channels
    parameters = dict(core.named_parameters())
    tied = core.share_embeddings_and_output_weights
    # An embedding table that is no head is only looked up in.
    read = {name: p for name, p in parameters.items() if tied or "word_embeddings" not in name}
    element = next(iter(parameters.values())).element_size()
    head = core.logical_vocab_size * config.hidden_size
    block = sum(p.numel() for name, p in read.items() if p.dim() > 1) - head
    kept = 2 * config.num_layers * config.num_query_groups * head_size
    logits = rows * scored * core.logical_vocab_size
    moved = (sum(p.numel() for p in read.values()) + rows * keys * kept + logits) * element
    attention = 4 * config.num_layers * config.num_attention_heads * head_size * rows * positions * keys
    return moved, 2.0 * rows * (positions * block + scored * head) + attention


def measured_row(what: str, clock: Clock, cost: tuple[float, float], arguments: argparse.Namespace) -> dict:
    """A row of the table for passes that were timed."""
    seconds = min(clock.seconds())
    memory, compute = cost[0] / arguments.bandwidth, cost[1] / arguments.flops
    return {
        "what": what,
        "ms": _digits(1000 * seconds),
        "roofline ms": _digits(1000 * max(memory, compute)),
        "bound by": "memory" if memory > compute else "compute",
        "of roofline": f"{100 * max(memory, compute) / seconds:.0f} %",
        "GB": _digits(cost[0] / 1e9),
        "TFLOP": _digits(cost[1] / 1e12),
    }


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def canvas_forward(model: MegatronDenoiser, rows: int, length: int, arguments: argparse.Namespace) -> dict:
    """The whole canvas at once, with logits of a block, as a sampler without a cache runs it at every step."""
    size = arguments.block_size or model.block_size or CANVAS_BLOCK
    tokens_BT = torch.randint(1, model.core.logical_vocab_size, (rows, length), device=device_of(model))
    rows_N, positions_N = torch.ones_like(tokens_BT[:, :size]).nonzero(as_tuple=True)
    clock = Clock()
    for work in (model.score_positions, *[partial(clock, model.score_positions)] * ROUNDS):
        work(tokens_BT, rows_N, positions_N)
    return measured_row(f"canvas of {length}", clock, pass_cost(model.core, rows, length, length, size), arguments)


def block_step(model: MegatronDenoiser, rows: int, arguments: argparse.Namespace) -> dict:
    """One block, with keys and values of all before it in the cache."""
    size, context = arguments.block_size or model.block_size or CANVAS_BLOCK, arguments.context
    device = device_of(model)
    tokens_BT = torch.randint(1, model.core.logical_vocab_size, (rows, context + size), device=device)
    positions_BT = torch.arange(context + size, device=device).expand(rows, -1)
    real_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    cache = model.new_cache(rows, context + size)
    given, block = slice(0, context), slice(context, None)
    model.commit(
        tokens_BT[:, given],
        positions_BT[:, given],
        cache,
        key_mask_BL=real_BT[:, given],
        blocks_BL=positions_BT[:, given] // size,
    )
    clock = Clock()
    for work in (model.denoise, *[partial(clock, model.denoise)] * ROUNDS):
        work(tokens_BT[:, block], positions_BT[:, block], cache, key_mask_BL=real_BT[:, block])
    return measured_row(f"block of {size}", clock, pass_cost(model.core, rows, size, context + size, size), arguments)


def sampler_run(model: MegatronDenoiser, rows: int, cache: str | None, committed: int, arguments) -> dict:
    """The sampler with a fixed number of tokens per forward."""
    size = arguments.block_size or model.block_size or CANVAS_BLOCK
    config = SamplerConfig(
        max_new_tokens=arguments.new_tokens,
        block_size=size,
        steps_per_block=max(size // committed, 1),
        schedule="even",
        cache=cache,
        block_origin="prompt" if model.block_size is None else "sequence",
        seed=0,
    )
    prompts = torch.randint(1, model.core.logical_vocab_size, (rows, arguments.context)).tolist()
    run = partial(generate, prompts=prompts, mask_token_id=0, device=device_of(model), config=config)

    def seconds_of(model: MegatronDenoiser | TimedDenoiser) -> tuple[float, GenerateResult]:
        start = time.perf_counter()
        result = run(model)
        return time.perf_counter() - start, result

    # The third pass of a shape is recorded; of one row the prompts' too, of which a generation has one.
    first, *_ = (seconds_of(model)[0] for _ in range(4 if rows == 1 else 1))
    runs = []
    for _ in range(ROUNDS if rows == 1 else 1):
        timed = TimedDenoiser(model)
        seconds, result = seconds_of(timed)
        runs.append((seconds, sum(timed.clock.seconds()), result))
    seconds, in_model, result = sorted(runs, key=itemgetter(0))[len(runs) // 2]
    return {
        "what": f"sampler, {committed} per forward, cache {cache}",
        "tokens/s": round(rows * arguments.new_tokens / seconds, 1),
        "forwards": result.steps,
        "tokens per forward and row": round(arguments.new_tokens / result.steps, 2),
        "s": round(seconds, 3),
        "first s": round(first, 3),
        "ms": _digits(1000 * seconds / result.steps),
        "overhead": f"{100 * (1 - in_model / seconds):.1f} %",
    }


def device_of(model: MegatronDenoiser) -> torch.device:
    """Where the weights are."""
    return next(model.core.parameters()).device


def measurements(model: MegatronDenoiser, rows: int, arguments: argparse.Namespace) -> list[Callable[[], dict]]:
    """What is measured for a batch, in order."""
    caches = arguments.caches or (["exact"] if model.block_size else ["none", "approximate_dual"])
    lengths = arguments.canvas or [arguments.context + arguments.new_tokens]
    canvases = [partial(canvas_forward, model, rows, length, arguments) for length in lengths]
    settings = product((None if name == "none" else name for name in caches), COMMITTED)
    runs = [partial(sampler_run, model, rows, *setting, arguments) for setting in settings]
    return [*canvases, partial(block_step, model, rows, arguments), *runs]


def print_row(row: dict) -> None:
    """A row of a Markdown table, at once."""
    print(f"| {' | '.join(str(row.get(name, '')) for name in COLUMNS)} |", flush=True)


def main(given: list[str] | None = None) -> None:
    """Parse the command line, measure, print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 128], help="rows")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt; a multiple of the block size")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--canvas", type=int, nargs="+", help="positions; default: those of a prompt and the new ones")
    parser.add_argument("--block-size", type=int, help="default: the model's; 32 for models without blocks")
    parser.add_argument("--layers", type=int, help="default: the model's")
    parser.add_argument("--caches", nargs="+", help="of the sampler: none, exact, approximate_prefix, ...")
    parser.add_argument("--bandwidth", type=float, default=H200_BYTES_PER_SECOND, help="bytes per second")
    parser.add_argument("--flops", type=float, default=H200_BF16_FLOPS, help="operations per second")
    parser.add_argument("--json", metavar="FILE", help="append rows as lines of JSON")
    arguments = parser.parse_args(given)
    with torch.no_grad():
        model = build(SHAPES[arguments.shape], arguments.block_size, arguments.layers)
        for heads in (COLUMNS, ["---"] * len(COLUMNS)):
            print_row(dict(zip(COLUMNS, heads, strict=True)))
        for rows in arguments.batch:
            for measure in measurements(model, rows, arguments):
                row = {"shape": arguments.shape, "rows": rows}
                try:
                    row |= measure()
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    row |= {"what": "out of memory"}
                print_row(row)
                if arguments.json:
                    with open(arguments.json, "a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
