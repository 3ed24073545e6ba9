"""Peak memory of importing and exporting a checkpoint, beside what it may take: the model, a shard and a layer.

    python benchmarks/convert.py --size 1B
    python benchmarks/convert.py --size 8B --shard-size 5GB --folder /big/disk

Makes a random checkpoint of a published model's sizes (bf16, in shards), imports it, exports that and compares the
files, each conversion in a process of its own. The memory of a process is that of its anonymous pages at their peak, so
that pages of files that the system keeps at hand do not count. What NeMo and torch take, after a conversion of a tiny
model, is told apart.
"""

import argparse
import filecmp
import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SUMMARY = "nemo_dllm_conversion.json"
INDEX = "model.safetensors.index.json"
_LOOKS_PER_SECOND = 50


class Sizes(NamedTuple):
    """Of a Qwen3."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int = 151936
    groups: int = 8
    head_dim: int = 128


SIZES = {
    "tiny": Sizes(1, 64, 64, 2, vocab=64, groups=2, head_dim=32),
    "0.1B": Sizes(8, 512, 1536, 8, vocab=65536),
    "1B": Sizes(28, 1536, 4096, 12, vocab=65536, groups=4),
    "1.7B": Sizes(28, 2048, 6144, 16),
    "4B": Sizes(36, 2560, 9728, 32),
    "8B": Sizes(36, 4096, 12288, 32),
}


def tensor_shapes(sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in the order in which published files hold them."""
    hidden, query, key = sizes.hidden, sizes.heads * sizes.head_dim, sizes.groups * sizes.head_dim
    yield "model.embed_tokens.weight", (sizes.vocab, hidden)
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        for part, rows in (("q", query), ("k", key), ("v", key)):
            yield f"{prefix}self_attn.{part}_proj.weight", (rows, hidden)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, query)
        for part in "qk":
            yield f"{prefix}self_attn.{part}_norm.weight", (sizes.head_dim,)
        for part in ("gate", "up"):
            yield f"{prefix}mlp.{part}_proj.weight", (sizes.ffn, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, sizes.ffn)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (sizes.vocab, hidden)


def make_checkpoint(folder: str, size: str, shard_size: str) -> None:
    """Write a random checkpoint without a tokenizer."""
    import torch

    from nemo_dllm.connectors.checkpoint_files import write_hf_checkpoint
    from nemo_dllm.connectors.safetensors_writer import TensorHeader
    from nemo_dllm.connectors.shard_layout import size_in_bytes

    sizes = SIZES[size]
    shapes = dict(tensor_shapes(sizes))
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.groups,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "mask_token_id": sizes.vocab - 1,
        "dtype": "bfloat16",
    }
    generator = torch.Generator().manual_seed(0)
    headers = {name: TensorHeader(torch.bfloat16, shape) for name, shape in shapes.items()}
    tensors = ((name, random_bfloat16(shape, generator)) for name, shape in shapes.items())
    write_hf_checkpoint(folder, config, headers, tensors, max_shard_size=size_in_bytes(shard_size))


def random_bfloat16(shape: tuple[int, ...], generator):
    """Numbers between 0.008 and 2: bits are drawn, because normal ones take minutes."""
    import torch

    bits = torch.randint(0, 1 << 10, shape, dtype=torch.int16, generator=generator)
    return bits.add_(15 << 10).view(torch.bfloat16)


def convert(direction: str, source: str, output: str) -> None:
    """Import or export in this process, and print its memory and seconds as JSON, in the last line."""
    from nemo_dllm.connectors.conversion import import_checkpoint
    from nemo_dllm.connectors.hf_export import export_hf_checkpoint

    convert_one = {"import": import_checkpoint, "export": export_hf_checkpoint}[direction]
    with tempfile.TemporaryDirectory() as folder:
        # What NeMo, Megatron and torch load at their first use is no part of a model.
        make_checkpoint(f"{folder}/source", "tiny", "1GB")
        export_hf_checkpoint(import_checkpoint(f"{folder}/source", f"{folder}/nemo"), f"{folder}/hf")
    gc.collect()
    before, peaks, ended = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(1 / _LOOKS_PER_SECOND):
            peaks[0] = max(peaks[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    convert_one(source, output)
    seconds = time.perf_counter() - start
    ended.set()
    watcher.join()
    print(json.dumps({"before": before, "peak": peaks[0], "seconds": seconds}))


def anonymous_bytes() -> int:
    """Memory of this process that no file can give back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def run_conversion(direction: str, source: Path, output: Path) -> dict[str, float]:
    """What :func:`convert` prints in a process of its own."""
    command = [sys.executable, __file__, "--conversion", direction, str(source), str(output)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def bound(folder: Path, sizes: Sizes) -> tuple[int, int]:
    """Bytes of the model, and what a conversion may take: model, largest shard and largest layer."""
    shapes = dict(tensor_shapes(sizes))
    count = {name: 2 * (shape[0] * shape[1] if len(shape) == 2 else shape[0]) for name, shape in shapes.items()}
    layer = sum(size for name, size in count.items() if name.startswith("model.layers.0."))
    shard = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    return sum(count.values()), sum(count.values()) + shard + layer


def main() -> None:
    """Print the table; exit code 1 where a conversion takes more, or the files differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1B")
    parser.add_argument("--shard-size", default="500MB")
    parser.add_argument("--folder", help="where the checkpoints go for the time being: three times the model")
    parser.add_argument("--conversion", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.conversion:
        convert(*arguments.conversion)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        folders = {name: Path(root) / name for name in ("source", "nemo", "hf")}
        make_checkpoint(str(folders["source"]), arguments.size, arguments.shard_size)
        model, allowed = bound(folders["source"], SIZES[arguments.size])
        print(f"Qwen3 of {arguments.size}: {model / 1e9:.2f} GB in bf16, shards of {arguments.shard_size}")
        print("| | before, GB | peak above, GB | times the model | bound, GB | seconds |\n|---|---|---|---|---|---|")
        passed = True
        for direction, read, written in (("import", "source", "nemo"), ("export", "nemo", "hf")):
            found = run_conversion(direction, folders[read], folders[written])
            above = found["peak"] - found["before"]
            passed &= above <= allowed
            print(
                f"| {direction} | {found['before'] / 1e9:.2f} | {above / 1e9:.2f} | {above / model:.2f} | "
                f"{allowed / 1e9:.2f} | {found['seconds']:.0f} |",
                flush=True,
            )
        names = [file.name for file in folders["source"].iterdir() if file.name.endswith((".safetensors", INDEX))]
        _, different, absent = filecmp.cmpfiles(folders["source"], folders["hf"], names, shallow=False)
    print("the same files" if not different + absent else f"other files: {', '.join(different + absent)}")
    sys.exit(not passed or bool(different + absent))


if __name__ == "__main__":
    main()
