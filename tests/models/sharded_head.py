"""One rank of the head over a sharded vocabulary, run as a script: store rank size cases output.

``cases`` is a file with a list of dicts: hidden [N, H], weight [V, H] with V a multiple of the ranks, targets,
loss_weight, vocab_size (rows beyond are padding) and chunk. Writes a list of dicts: loss, nll, grad_hidden,
grad_weight of this rank.
"""

import sys

import torch

from nemo_dllm.collections.diffusion.models.head import VocabularyShard, masked_cross_entropy


def run(case, group):
    rows = case["weight"].size(0) // group.size()
    start = group.rank() * rows
    hidden = case["hidden"].clone().requires_grad_()
    weight = case["weight"][start : start + rows].clone().requires_grad_()
    shard = VocabularyShard(start, min(max(case["vocab_size"] - start, 0), rows), group)
    loss, nll = masked_cross_entropy(hidden, weight, case["targets"], case["loss_weight"], shard, case["chunk"])
    (loss * case["scale"]).backward()
    return {"loss": loss.detach(), "nll": nll, "grad_hidden": hidden.grad, "grad_weight": weight.grad}


if __name__ == "__main__":
    store, rank, size, cases, output = sys.argv[1:]
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size))
    torch.save([run(case, torch.distributed.group.WORLD) for case in torch.load(cases)], output)
    torch.distributed.destroy_process_group()
