"""Requests of mixed lengths to the engine of a server, by clients of which each waits for its last answer.

    python benchmarks/serve.py sdar_8b --clients 1 8 32 128

Weights are random. A fixed number of tokens is committed by each forward, as a trained model would by its confidence.
Without a server around it: HTTP, tokenizer and chat template are not measured. Beside it the same requests in batches
of as many rows as there are clients, each of which runs to its end before the next one begins. Both begin with what is
recorded in answering a few requests before. Rows and milliseconds are those per denoising step; what else is done
meanwhile, as to encode prompts, is in the milliseconds.
"""

import argparse
import json
import random
import statistics
import threading
import time
from dataclasses import replace

from nemo_dllm.console import import_nemo_quietly

import_nemo_quietly()

import torch  # noqa: E402
from sample_models import SHAPES, build  # noqa: E402

from nemo_dllm.collections.diffusion.inference import MegatronDenoiser  # noqa: E402
from nemo_dllm.collections.diffusion.sampling import SamplerConfig, generate  # noqa: E402
from nemo_dllm.collections.diffusion.serving.engine import BatchingEngine  # noqa: E402
from nemo_dllm.collections.diffusion.serving.limits import ServerLimits  # noqa: E402
from nemo_dllm.collections.diffusion.serving.rows import Row, RowUpdate  # noqa: E402

WARM_UP = 16
"""Requests that are answered before those that are measured, at least."""
COLUMNS = ("shape", "clients", "tokens/s", "in batches", "rows per pass", "ms per pass")
COLUMNS += ("first text s, median", "95 %", "answer s, median", "95 %")


class Tally:
    """What an engine tells of its passes, in the place of a server's metrics."""

    def __init__(self):
        self.rows: list[int] = []
        self.batch_rows, self.passes = self, self

    def observe(self, rows: int) -> None:
        """Rows of a pass."""
        self.rows.append(rows)

    def inc(self) -> None:
        """A pass, which ``observe`` has counted."""


class Clients:
    """Clients that each ask again as soon as they are answered, until all requests are made.

    Args:
        engine: answers.
        requests: (prompt, number of tokens), in order.
        config: of all requests.
    """

    def __init__(self, engine: BatchingEngine, requests: list[tuple[list[int], int]], config: SamplerConfig):
        self._engine, self._left, self._config = engine, list(enumerate(requests))[::-1], config
        self._open, self._ended, self._error = len(requests), threading.Event(), None
        self.first, self.last = [], []

    def run(self, number: int) -> float:
        """Seconds until all requests of as many clients are answered."""
        start = time.perf_counter()
        for _ in range(number):
            self._ask()
        self._ended.wait()
        if self._error:
            raise self._error
        return time.perf_counter() - start

    def _ask(self) -> None:
        if not self._left:
            return
        seed, (prompt, tokens) = self._left.pop()
        asked, began = time.perf_counter(), False

        def deliver(update: RowUpdate) -> None:
            nonlocal began
            if update.error:
                self._error = update.error
                self._ended.set()
            seconds = time.perf_counter() - asked
            if update.tokens and not began:
                self.first.append(seconds)
                began = True
            if update.finish_reason:
                self.last.append(seconds)
                self._open -= 1
                self._ask()
                if not self._open:
                    self._ended.set()

        self._engine.submit([Row(prompt, [], tokens, self._config, seed, 0, deliver, streams=True)])


def some_requests(number: int, arguments: argparse.Namespace, vocabulary: int) -> list[tuple[list[int], int]]:
    """Prompts and numbers of tokens, the same ones each time."""
    lengths = random.Random(0)
    made = []
    for _ in range(number):
        prompt = [lengths.randrange(1, vocabulary) for _ in range(lengths.randint(*arguments.prompt))]
        made.append((prompt, lengths.randint(*arguments.new_tokens)))
    return made


def afresh(model: MegatronDenoiser) -> MegatronDenoiser:
    """The model, of which nothing is recorded yet."""
    return MegatronDenoiser(model.core, model.block_size)


def in_batches(model: MegatronDenoiser, requests: list, rows: int, config: SamplerConfig) -> float:
    """Seconds for the same requests, batch by batch, each as long as its longest answer."""
    device = next(model.core.parameters()).device
    start = time.perf_counter()
    for first in range(0, len(requests), rows):
        prompts, tokens = zip(*requests[first : first + rows], strict=True)
        generate(model, prompts, replace(config, max_new_tokens=max(tokens)), mask_token_id=0, device=device)
    return time.perf_counter() - start


def measured(model: MegatronDenoiser, clients: int, arguments: argparse.Namespace) -> dict:
    """A row of the table."""
    size = arguments.block_size or model.block_size
    config = SamplerConfig(
        block_size=size,
        steps_per_block=max(size // arguments.committed, 1),
        schedule="even",
        cache="exact",
        block_origin="sequence",
        seed=0,
    )
    vocabulary = model.core.logical_vocab_size
    requests = some_requests(clients * arguments.each, arguments, vocabulary)
    before = some_requests(max(2 * clients, WARM_UP), arguments, vocabulary)
    limits = ServerLimits(max_batch_rows=clients, max_batch_tokens=1 << 30, max_waiting_rows=clients)
    tally = Tally()
    engine = BatchingEngine(
        afresh(model),
        mask_token_id=0,
        device=next(model.core.parameters()).device,
        decode=str,
        limits=limits,
        metrics=tally,
    )
    engine.start()
    try:
        Clients(engine, before, config).run(clients)
        tally.rows.clear()
        asked = Clients(engine, requests, config)
        seconds = asked.run(clients)
    finally:
        engine.close()
    batched = afresh(model)
    in_batches(batched, before, clients, config)
    tokens = sum(count for _, count in requests)
    return {
        "tokens/s": round(tokens / seconds, 1),
        "in batches": round(tokens / in_batches(batched, requests, clients, config), 1),
        "rows per pass": round(statistics.mean(tally.rows), 1),
        "ms per pass": round(1000 * seconds / len(tally.rows), 2),
        **times("first text s", asked.first),
        **times("answer s", asked.last),
    }


def times(of: str, seconds: list[float]) -> dict:
    """The middle of some times, and what all but a twentieth of them stay below."""
    ordered = sorted(seconds)
    return {
        f"{of}, median": round(ordered[len(ordered) // 2], 3),
        f"{of}, 95 %": round(ordered[int(0.95 * len(ordered))], 3),
    }


def main(given: list[str] | None = None) -> None:
    """Parse the command line, measure, print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=[name for name, shape in SHAPES.items() if shape.block_size])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--each", type=int, default=6, help="requests of a client")
    parser.add_argument("--prompt", type=int, nargs=2, default=[64, 512], metavar=("FROM", "TO"), help="tokens")
    parser.add_argument("--new-tokens", type=int, nargs=2, default=[32, 128], metavar=("FROM", "TO"))
    parser.add_argument("--committed", type=int, default=2, help="tokens of a block that a forward commits")
    parser.add_argument("--block-size", type=int, help="default: the model's")
    parser.add_argument("--layers", type=int, help="default: the model's")
    parser.add_argument("--json", metavar="FILE", help="append rows as lines of JSON")
    arguments = parser.parse_args(given)
    with torch.no_grad():
        model = build(SHAPES[arguments.shape], arguments.block_size, arguments.layers)
        for heads in (COLUMNS, ["---"] * len(COLUMNS)):
            print(f"| {' | '.join(heads)} |", flush=True)
        for clients in arguments.clients:
            row = {"shape": arguments.shape, "clients": clients, **measured(model, clients, arguments)}
            print(f"| {' | '.join(map(str, row.values()))} |", flush=True)
            if arguments.json:
                with open(arguments.json, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
