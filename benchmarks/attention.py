"""Attention of block diffusion, block-sparse and with a dense mask, forward and backward of one layer.

    python benchmarks/attention.py --lengths 2048 8192 32768

The input is [x_t | x_0], 2L positions. TFLOP/s count the allowed pairs only (forward 4 * head size per pair and head,
backward 2.5 times that), so that both forms are judged by the same useful work.
"""

import argparse
import json

import torch
import torch.nn.functional as F

from nemo_dllm.collections.diffusion.attention.flex import flex
from nemo_dllm.collections.diffusion.attention.masks import NoisyClean, dense_mask

ROUNDS = 10


def dense(query, key, value, pattern, scale, dropout):
    """Torch's fused kernels with every bit of the mask."""
    mask = dense_mask(pattern, query.size(2), key.size(2), query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)


def allowed_pairs(length: int, block_size: int) -> int:
    """Pairs of query and key that the three-part mask allows."""
    sizes = [min(block_size, length - start) for start in range(0, length, block_size)]
    earlier = [start * size for start, size in zip(range(0, length, block_size), sizes, strict=True)]
    return 2 * (sum(earlier) + sum(size * size for size in sizes))


def milliseconds(attend, pattern, tensors) -> tuple[float, float]:
    """Forward, and forward with backward: best of ``ROUNDS``."""
    query, key, value = tensors
    upstream = torch.randn_like(query)
    forward, both = [], []
    for _ in range(ROUNDS):
        start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        context = attend(query, key, value, pattern, query.size(-1) ** -0.5, 0.0)
        middle.record()
        torch.autograd.grad(context, tensors, upstream)
        end.record()
        torch.cuda.synchronize()
        forward.append(start.elapsed_time(middle))
        both.append(start.elapsed_time(end))
    return min(forward), min(both)


def measure(attend, arguments, length: int) -> dict:
    """One row of the table; its times are None where the form does not fit the memory."""
    batch = max(arguments.tokens // length, 1)
    heads = (arguments.heads, arguments.groups, arguments.groups)
    shapes = [(2 * length, batch, count, arguments.head_size) for count in heads]
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).permute(1, 2, 0, 3) for shape in shapes]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        forward, both = milliseconds(attend, NoisyClean(arguments.block_size, length), tensors)
    except torch.cuda.OutOfMemoryError:
        forward = both = None
    pairs = allowed_pairs(length, arguments.block_size)
    flops = 3.5 * 4 * pairs * batch * arguments.heads * arguments.head_size
    return {
        "attention": attend.__name__,
        "sequences": f"{batch} x {length}",
        "allowed": f"{100 * pairs / (2 * length) ** 2:.1f} %",
        "forward ms": forward and round(forward, 2),
        "forward + backward ms": both and round(both, 2),
        "us per token": both and round(1000 * both / batch / length, 3),
        "useful TFLOP/s": both and round(flops / both / 1e9),
        "peak GB": round((torch.cuda.max_memory_allocated() - before) / 1e9, 2),
    }


def main() -> None:
    """Parse the command line, measure, print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768], help="tokens of text, L")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of text in a batch")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--groups", type=int, default=8, help="key/value heads")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--json", metavar="FILE", help="append rows as lines of JSON")
    arguments = parser.parse_args()
    for length in arguments.lengths:
        for attend in (flex, dense):
            row = measure(attend, arguments, length)
            print("  ".join(f"{name}: {value}" for name, value in row.items()), flush=True)
            if arguments.json:
                with open(arguments.json, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
