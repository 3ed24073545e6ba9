"""A layout that does not fit is refused before anything is built: one message, with the nearest setting that fits."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.nemo

EXPERTS = {
    "model.config.num_moe_experts": 6,
    "model.config.moe_ffn_hidden_size": 96,
    "model.config.moe_router_topk": 2,
}
COUNTED = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
LAST = ["decoder"] * 4 + ["loss"]
# The recipe has 4 layers, 4 heads in 2 groups, 576 wide, 128 tokens, 16 samples at a time; here on 12 devices.
CASES = {
    "more ranks of a model than devices": (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4, "context_parallel_size": 2},
        {},
        "12 x 1 = 12 is not divisible by tensor x pipeline x context parallel size = 2 x 4 x 2 = 16; "
        ".* nearest is trainer.devices=16",
    ),
    "experts over more ranks than there are": (
        {"expert_model_parallel_size": 6, "pipeline_model_parallel_size": 4},
        EXPERTS,
        "= 12 is not divisible by expert tensor x expert x pipeline parallel size = 1 x 6 x 4 = 24; .*devices=24",
    ),
    "heads": (
        {"tensor_model_parallel_size": 3},
        {},
        "num_attention_heads=4 is not divisible by .*tensor_model_parallel_size=3; set .*tensor_model_parallel_size=2",
    ),
    "groups of heads": (
        {"tensor_model_parallel_size": 4},
        {},
        "num_query_groups=2 is not divisible by .*tensor_model_parallel_size=4; set .*tensor_model_parallel_size=2",
    ),
    "heads, whose nearest divisor does not divide the groups": (
        {"tensor_model_parallel_size": 3},
        {"model.config.num_attention_heads": 8},
        "num_attention_heads=8 is not divisible by .*tensor_model_parallel_size=3; set .*tensor_model_parallel_size=2",
    ),
    "width of the shared expert": (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        EXPERTS | {"model.config.moe_shared_expert_intermediate_size": 97},
        "moe_shared_expert_intermediate_size=97 is not divisible by .*tensor_model_parallel_size=2; set .*size=1",
    ),
    "more experts of a token than there are": (
        {},
        EXPERTS | {"model.config.moe_router_topk": 7},
        "moe_router_topk=7 experts of a token are more than model.config.num_moe_experts=6; set .*moe_router_topk=6",
    ),
    "experts of other layers": (
        {},
        EXPERTS | {"model.config.moe_layer_freq": [0, 1, 1]},
        r"moe_layer_freq=\[0, 1, 1\] is of 3 layers, model.config.num_layers=4; give a 1 for each layer with experts",
    ),
    "width": (
        {"tensor_model_parallel_size": 2},
        {"model.config.ffn_hidden_size": 577},
        "ffn_hidden_size=577 is not divisible by .*tensor_model_parallel_size=2; set .*tensor_model_parallel_size=1",
    ),
    "experts": (
        {"expert_model_parallel_size": 4},
        EXPERTS,
        "num_moe_experts=6 is not divisible by .*expert_model_parallel_size=4; set .*expert_model_parallel_size=3",
    ),
    "width of experts": (
        {"expert_tensor_parallel_size": 4},
        EXPERTS | {"model.config.moe_ffn_hidden_size": 98},
        "moe_ffn_hidden_size=98 is not divisible by .*expert_tensor_parallel_size=4; set .*tensor_parallel_size=2",
    ),
    "no experts": (
        {"expert_model_parallel_size": 2},
        {},
        "expert_model_parallel_size=2, but the model has no experts; set .*expert_model_parallel_size=1",
    ),
    "experts on tensor-parallel ranks": (
        {"tensor_model_parallel_size": 2},
        EXPERTS,
        "tensor_model_parallel_size=2 with experts needs .*sequence_parallel=True, which is False; set it to True",
    ),
    "sequence without tensor parallelism": (
        {"sequence_parallel": True},
        {},
        "sequence_parallel=True needs .*tensor_model_parallel_size above 1, which is 1; set .*sequence_parallel=False",
    ),
    "more stages than layers": (
        {"pipeline_model_parallel_size": 6},
        {},
        "num_layers=4 is not divisible by .*pipeline_model_parallel_size=6; set .*pipeline_model_parallel_size=4",
    ),
    "virtual stages": (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4},
        {},
        "num_layers=4 over .*pipeline_model_parallel_size=2 makes 2 layers a stage, not divisible by "
        ".*virtual_pipeline_model_parallel_size=4; set .*virtual_pipeline_model_parallel_size=2",
    ),
    "stages, the nearest number of which has no chunks": (
        {"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2},
        {},
        "num_layers=4 is not divisible by .*pipeline_model_parallel_size=3; set .*pipeline_model_parallel_size=2",
    ),
    "chunks of single layers": (
        {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2},
        {},
        "makes 1 layers a stage, not divisible by .*; set .*virtual_pipeline_model_parallel_size=None",
    ),
    "all layers in the first stage": (
        {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 4},
        {},
        "num_layers_in_first_pipeline_stage=4 leave no equal numbers of model.config.num_layers=4 for the other stages "
        "of .*pipeline_model_parallel_size=2; set trainer.strategy.num_layers_in_first_pipeline_stage=3",
    ),
    "uneven middle stages": (
        {"pipeline_model_parallel_size": 4, "num_layers_in_last_pipeline_stage": 2},
        {},
        "num_layers_in_last_pipeline_stage=2 leave no equal numbers of .*; set .*num_layers_in_last_pipeline_stage=1",
    ),
    "first and last stages without the rest": (
        {
            "pipeline_model_parallel_size": 2,
            "num_layers_in_first_pipeline_stage": 2,
            "num_layers_in_last_pipeline_stage": 1,
        },
        {},
        "num_layers_in_first_pipeline_stage=2 and .*num_layers_in_last_pipeline_stage=1 leave .*; "
        "set .*num_layers_in_first_pipeline_stage=3",
    ),
    "chunks of the first stage": (
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "num_layers_in_first_pipeline_stage": 1,
        },
        {},
        "num_layers_in_first_pipeline_stage=1 leave .* of 2 chunks each; set .*first_pipeline_stage=2",
    ),
    "an embedding that counts as a layer": (
        {"pipeline_model_parallel_size": 2, "account_for_embedding_in_pipeline_split": True},
        {},
        r"num_layers \(with account_for_embedding_in_pipeline_split\)=5 is not divisible by .*; set .*size=1",
    ),
    "a layout of other layers": (
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|tttL"},
        {},
        r"pipeline_model_parallel_layout=Ett\|tttL does not deal out model.config.num_layers=4 over .*=2 \(.*5.*\); "
        "change it, or set it to None",
    ),
    "a layout of other stages": (
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tt|tL"},
        {},
        "pipeline_model_parallel_layout=.* does not deal out",
    ),
    "a layout of chunks": (
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t|t|tL"},
        {},
        "pipeline_model_parallel_layout deals out 2 chunks for each stage of .*pipeline_model_parallel_size=2, "
        ".*virtual_pipeline_model_parallel_size=None; set it to 2",
    ),
    "a layout that is none": (
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": 2},
        {},
        "pipeline_model_parallel_layout=2 does not deal out .*neither a text nor a list of stages",
    ),
    "layers dealt out in two ways": (
        {
            "pipeline_model_parallel_size": 2,
            "num_layers_in_first_pipeline_stage": 1,
            "pipeline_model_parallel_layout": "Et|tttL",
        },
        {},
        "num_layers_in_first_pipeline_stage and .*pipeline_model_parallel_layout deal out layers, each in its way; lea",
    ),
    "virtual stages of one": (
        {"virtual_pipeline_model_parallel_size": 2},
        {},
        "virtual_pipeline_model_parallel_size=2 needs .*pipeline_model_parallel_size above 1, .*; set .*size=None",
    ),
    "odd micro-batches of virtual stages": (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {"data.micro_batch_size": 1, "data.global_batch_size": 18},
        "global_batch_size=18 makes 3 micro-batches, which virtual stages take in groups of "
        ".*pipeline_model_parallel_size=2; set data.global_batch_size=24",
    ),
    "context": (
        {"context_parallel_size": 6},
        {},
        "data.seq_length=128 is not divisible by .*context_parallel_size=6; set .*context_parallel_size=4",
    ),
    "context that cuts a block": (
        {"context_parallel_size": 4},
        {"model.objective.block_size": 64},
        "data.seq_length=128 over .*context_parallel_size=4 makes shards of 32 tokens, which cut a block of "
        "model.objective.block_size=64; set .*context_parallel_size=2",
    ),
    "context whose nearest divisor cuts a block": (
        {"context_parallel_size": 12},
        {"model.objective.block_size": 64},
        "data.seq_length=128 is not divisible by .*context_parallel_size=12; set .*context_parallel_size=2",
    ),
    "a block longer than the rows": (
        {},
        {"model.objective.block_size": 129},
        "model.objective.block_size=129 is longer than data.seq_length=128; choose a smaller block",
    ),
    "blocks of unknown documents": (
        {},
        {"model.objective.block_size": 8, "data.document_boundaries": None},
        "data.document_boundaries=None: .* set document_boundaries=True",
    ),
    "context and sequence": (
        {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"data.seq_length": 126},
        "data.seq_length=126 is not divisible by .*context_parallel_size x .*tensor_model_parallel_size = 2 x 2 = 4; "
        "set data.seq_length=128",
    ),
}


@pytest.mark.parametrize("strategy, edits, text", CASES.values(), ids=CASES)
def test_sizes_that_do_not_go_together(check_sizes, strategy, edits, text):
    with pytest.raises(ValueError, match=text):
        check_sizes(strategy, edits)


@pytest.mark.parametrize(
    "strategy, edits",
    [
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"model.config.vocab_size": 2049}),
        ({"context_parallel_size": 4}, {"model.objective.block_size": 32}),
        ({"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 2}, {}),
        ({"pipeline_model_parallel_size": 4, "num_layers_in_last_pipeline_stage": 1}, {}),
        ({"pipeline_model_parallel_size": 3, **COUNTED}, {}),
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ettt|tL"}, {}),
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": [["embedding"], LAST]}, {}),
        ({"expert_model_parallel_size": 6}, EXPERTS),
    ],
    ids=[
        "a vocabulary is padded",
        "whole blocks",
        "uneven stages",
        "a last stage",
        "tables count",
        "a layout",
        "a list",
        "one expert a rank",
    ],
)
def test_sizes_that_do(check_sizes, strategy, edits):
    check_sizes(strategy, edits)


def test_the_first_rank_speaks_and_all_exit(forks, tmp_path):
    """Nothing is built, and no rank waits for another."""
    edits = {"trainer.strategy.tensor_model_parallel_size": 4}
    script = str(Path(__file__).with_name("settings_run.py"))
    processes = []
    for rank in range(2):
        job = {"folder": str(tmp_path), "rank": rank, "ranks": 2, "edits": edits}
        processes.append(forks.Process(target=runpy.run_path, args=(script, {"job": job}, "__main__")))
        processes[-1].start()
    for process in processes:
        process.join(timeout=300)
    assert [process.exitcode for process in processes] == [1, 1]
    first, second = ((tmp_path / f"console{rank}").read_text() for rank in range(2))
    assert "is not divisible by tensor x pipeline x context parallel size = 4 x 1 x 1 = 4" in first
    assert "not divisible" not in second
    assert "Traceback" not in second
