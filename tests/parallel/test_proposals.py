"""Who sets what an error of a layout proposes gets no other error about that field, and soon none at all."""

import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.nemo

SIZES = (1, 2, 3, 4, 6, 8, 12)
# Of 48 devices.
DEVICES = 48
DENSE = {"num_moe_experts": None, "moe_ffn_hidden_size": None, "moe_shared_expert_intermediate_size": None}
MODELS = {
    "dense": DENSE | {"ffn_hidden_size": 36},
    "sequences that few ranks divide": DENSE | {"ffn_hidden_size": 96, "seq_length": 72, "block_size": 9},
    "narrow experts": {
        "ffn_hidden_size": 96,
        "num_moe_experts": 12,
        "moe_ffn_hidden_size": 20,
        "moe_shared_expert_intermediate_size": 40,
    },
}
NAMES = {"tensor_model_parallel_size": "tensor", "sequence_parallel": "sequence"}


@pytest.fixture(scope="module")
def refusal():
    """The error of an arrangement of a model on 48 devices; None for one that fits."""
    from nemo_dllm.collections.diffusion.models.layout import Arrangement, check_arrangement
    from nemo_dllm.collections.diffusion.models.layout_stages import check_even_stages

    def refusal(model, degrees):
        config = {"num_attention_heads": 24, "num_query_groups": 12, "num_layers": 20, "moe_layer_freq": 1} | model
        config = SimpleNamespace(**config, moe_router_topk=2)
        objective = SimpleNamespace(block_size=model.get("block_size"))
        arrangement = Arrangement(degrees, DEVICES, 1, model.get("seq_length", 40), 1, DEVICES * 12)
        try:
            check_arrangement(config, objective, arrangement)
            check_even_stages(config, degrees, DEVICES)
        except ValueError as error:
            return str(error)

    return refusal


def proposed(error, degrees):
    if error.endswith("sequence_parallel=True, which is False; set it to True"):
        return replace(degrees, sequence=True), {"sequence"}
    fields = {}
    for name, value in re.findall(r"(\w+)=(\w+)", error.rpartition("; set ")[2]):
        name = NAMES.get(name, name.removesuffix("_parallel_size").removesuffix("_model"))
        fields[name] = {"True": True, "False": False}.get(value) if value in ("True", "False") else int(value)
    return replace(degrees, **fields), set(fields)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("sequence", [False, True])
def test_proposals_fit(refusal, model, sequence):
    from nemo_dllm.collections.diffusion.models.degrees import Degrees

    refused = set()
    for tensor, pipeline, context, expert, own in product(SIZES, SIZES, SIZES, SIZES, (True, False)):
        if not model["num_moe_experts"] and (expert > 1 or not own):
            continue
        degrees = Degrees(tensor, pipeline, 1, context, expert, tensor if own else 1, sequence and tensor > 1)
        error, seen = refusal(model, degrees), set()
        while error and "the nearest is trainer.devices" not in error and "set data." not in error:
            before = degrees
            degrees, fields = proposed(error, degrees)
            assert fields and not fields & seen, (before, error)
            seen |= fields
            refused |= fields
            if "tensor" in fields and own:
                # Of which nobody has said anything.
                degrees = replace(degrees, expert_tensor=degrees.tensor)
            error = refusal(model, degrees)
        # The number of devices was the trouble from the start, or is none.
        assert not (seen and error and "trainer.devices" in error), (before, degrees, error)
    assert {"tensor", "pipeline", "context", *(["expert"] if model["num_moe_experts"] else [])} <= refused


def test_narrow_experts_count_for_the_tensor_parallel_size(refusal):
    from nemo_dllm.collections.diffusion.models.degrees import Degrees

    model = MODELS["narrow experts"] | {"num_attention_heads": 16, "num_query_groups": 8, "ffn_hidden_size": 64}
    model |= {"moe_shared_expert_intermediate_size": None, "moe_ffn_hidden_size": 36}
    degrees = Degrees(24, 1, 1, 1, 1, 24, True)
    # Eight divides heads, groups and MLP, but not 36.
    assert refusal(model, degrees).endswith("set trainer.strategy.tensor_model_parallel_size=4")
    assert refusal(model, replace(degrees, expert_tensor=1)).endswith("tensor_model_parallel_size=8")


def test_the_sequence_counts_where_it_is_cut(refusal):
    from nemo_dllm.collections.diffusion.models.degrees import Degrees

    model = DENSE | {"ffn_hidden_size": 64, "num_attention_heads": 16, "num_query_groups": 16, "seq_length": 44}
    degrees = Degrees(12, 1, 1, 1, 1, 12, False)
    assert refusal(model, degrees).endswith("set trainer.strategy.tensor_model_parallel_size=8")
    assert refusal(model, replace(degrees, sequence=True)).endswith("tensor_model_parallel_size=4")
    alone = "set trainer.strategy.tensor_model_parallel_size=1 and trainer.strategy.sequence_parallel=False"
    assert refusal(model | {"seq_length": 43}, replace(degrees, sequence=True)).endswith(alone)
