"""One global batch has one loss and one gradient in every layout of ranks, through the real training loop.

Everything is in double precision, where 1e-6 of the largest gradient is far from rounding, but for Megatron-FSDP, which
knows no doubles. It is compared in fp32 with the same layout without it, whose sums are in the same order; those of
tensor parallelism are not those of one process, and differ by up to 3e-6 in fp32. The second step of each job is a
mutated twin: one rank gets other noise, which must show.
"""

import functools

import pytest
import torch

pytestmark = pytest.mark.nemo

LENGTH = 24
# Rows with 24, 6, 13 and 1 maskable tokens, of 24, 10, 18 and 4 real ones; documents begin anywhere.
ROWS = {
    "tokens": torch.randint(0, 199, (4, LENGTH), generator=torch.Generator().manual_seed(0)),
    "loss_mask": torch.arange(LENGTH) < torch.tensor([[24], [6], [13], [1]]),
}
PADDED = ROWS | {"key_mask": torch.arange(LENGTH) < torch.tensor([[24], [10], [18], [4]])}
DOCUMENTS = PADDED | {"document_ids": (torch.arange(LENGTH) >= torch.tensor([[5], [24], [12], [2]])).long()}

DENSE = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "vocab_size": 200,
    "seq_length": LENGTH,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "share_embeddings_and_output_weights": True,
}
EXPERTS = DENSE | {
    "share_embeddings_and_output_weights": False,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "none",
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "alltoall",
}
BALANCED = EXPERTS | {
    "moe_aux_loss_coeff": 0.1,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_z_loss_coeff": 0.01,
}
MODELS = {"dense": DENSE, "experts": EXPERTS, "balanced experts": BALANCED}
SHARED = EXPERTS | {"moe_shared_expert_intermediate_size": 24}
CONFIGS = MODELS | {"shared experts": SHARED, "overlapped experts": SHARED | {"moe_shared_expert_overlap": True}}
BLOCKS = {"block_size": 4}
# Rows, kind and fields of the objective.
TASKS = {
    "mdlm": (PADDED, ("mdlm", {})),
    "mdlm, full rows": (ROWS, ("mdlm", {})),
    "mdlm, documents": (DOCUMENTS, ("mdlm", {})),
    "bd3lm": (PADDED, ("bd3lm", BLOCKS)),
    "bd3lm, documents": (DOCUMENTS, ("bd3lm", BLOCKS)),
    "bd3lm, clean half read": (DOCUMENTS, ("bd3lm", BLOCKS | {"right_shift": True, "ar_loss_weight": 0.5})),
    "mdlm, complementary": (PADDED, ("mdlm", {"complementary": True})),
}
TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
INTERLEAVED = PIPELINE | {"virtual_pipeline_model_parallel_size": 2}
TABLES_AS_LAYERS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
CONTEXT = {"context_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}
FULLY_SHARDED = {"fsdp": "megatron"}
# Number of ranks, and fields of the strategy.
LAYOUTS = {
    "tensor": (2, TENSOR),
    "tensor and sequence": (2, SEQUENCE),
    "pipeline": (2, PIPELINE),
    "interleaved pipeline": (2, INTERLEAVED),
    "pipeline, uneven": (2, PIPELINE | {"num_layers_in_first_pipeline_stage": 3}),
    "interleaved pipeline, uneven": (2, INTERLEAVED | {"num_layers_in_last_pipeline_stage": 2}),
    "pipeline, tables as layers": (2, PIPELINE | TABLES_AS_LAYERS),
    "pipeline, laid out": (2, PIPELINE | {"pipeline_model_parallel_layout": "E|ttttL"}),
    "distributed optimizer": (2, {}),
    "distributed optimizer, overlapped": (2, {}),
    "fully sharded": (2, FULLY_SHARDED),
    "context": (2, CONTEXT),
    "expert": (2, EXPERT),
    "expert tensor alone": (2, {"expert_tensor_parallel_size": 2}),
    "expert tensor": (2, SEQUENCE | {"expert_tensor_parallel_size": 2}),
    "tensor, and experts whole": (2, SEQUENCE | EXPERT | {"expert_tensor_parallel_size": 1}),
    "tensor x pipeline": (4, SEQUENCE | PIPELINE),
    "tensor x context": (4, SEQUENCE | CONTEXT),
    "context x distributed optimizer": (4, CONTEXT),
    "pipeline x context": (4, INTERLEAVED | CONTEXT),
    "expert x context": (4, EXPERT | CONTEXT),
    "expert x pipeline": (4, EXPERT | PIPELINE),
    "fully sharded x tensor": (4, FULLY_SHARDED | SEQUENCE),
    "fully sharded x context": (4, FULLY_SHARDED | CONTEXT),
}
# With tensor parallelism, Megatron trains experts under sequence parallelism only.
FOR_DENSE = (
    *("tensor", "tensor and sequence", "pipeline", "interleaved pipeline", "distributed optimizer"),
    *("distributed optimizer, overlapped", "fully sharded", "context"),
)
RARE = [name for name in LAYOUTS if name.endswith(("uneven", "as layers", "laid out", "alone"))]
FOR_EXPERTS = (*FOR_DENSE[2:], "expert", "expert tensor", "tensor, and experts whole")
ON_FOUR = [name for name, (ranks, _) in LAYOUTS.items() if ranks == 4]
# All layouts of these are quick enough for every run of the tests; of the other tasks, the layouts in QUICK are.
MAIN_TASKS = ("mdlm", "bd3lm, documents")
QUICK = ("tensor and sequence", "interleaved pipeline", "context")


def case(model, task, layout, slow):
    return pytest.param(
        model, task, layout, marks=[pytest.mark.slow] * slow, id=f"{model}: {task}: {layout}".replace(",", "")
    )


CASES = [
    *(
        case("dense", task, layout, slow=task not in MAIN_TASKS and layout not in QUICK)
        for task in TASKS
        for layout in FOR_DENSE
    ),
    *(
        case(model, task, layout, slow="overlapped" in layout)
        for model in list(MODELS)[1:]
        for task in ("mdlm", "bd3lm")
        for layout in FOR_EXPERTS
    ),
    *(
        case(model, task, layout, slow=True)
        for model in ("dense", "balanced experts")
        for task in MAIN_TASKS
        for layout in ON_FOUR
        if model != "dense" or "expert" not in layout
    ),
    *(
        case(model, "bd3lm, documents", layout, slow=True)
        for model in ("dense", "balanced experts")
        for layout in RARE
        if model != "dense" or "expert" not in layout
    ),
]
SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
RECOMPUTATIONS = {
    "selective": SELECTIVE | {"recompute_modules": ["core_attn"]},
    "feed-forward networks": SELECTIVE | {"recompute_modules": ["mlp", "moe"]},
    "full": FULL | {"recompute_method": "uniform"},
    "first layers of a stage": FULL | {"recompute_method": "block"},
}


@pytest.fixture(scope="module")
def steps(pools):
    """Loss and gradients by name of the step and of its mutated twin; each job runs at its first call."""

    @functools.cache
    def run(model, task, layout=None, mutate="noise_by_rank", micro_batch_size=1, recomputation=None, double=True):
        ranks, strategy = LAYOUTS[layout] if layout else (1, {})
        rows, objective = TASKS[task]
        if "tensor_model_parallel_size" in strategy and mutate == "noise_by_rank":
            mutate = "inputs_by_rank"
        results = pools(ranks).run(
            "gradients",
            rows=rows,
            config=CONFIGS[model] | RECOMPUTATIONS.get(recomputation, {}),
            objective=objective,
            layout=strategy,
            micro_batch_size=micro_batch_size,
            mutate=mutate,
            double=double and not is_fully_sharded(layout),
            distributed=bool(layout) and ("distributed" in layout or is_fully_sharded(layout)),
            overlap=bool(layout) and "overlapped" in layout,
        )
        return [(results[-1][step][0], whole(results, step)) for step in range(2)]

    return run


def is_fully_sharded(layout):
    return bool(layout) and "sharded" in layout


def whole(results, step):
    """Gradients put together from all ranks' parts; what several ranks have must be the same."""
    gradients = {}
    for rank in results:
        for name, places, shape, values in rank[step][1]:
            part = tuple(slice(start, start + size) for start, size in places)
            gradient = gradients.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            values = values.view_as(gradient[part]).double()
            if step == 0 and not gradient[part].isnan().any():
                torch.testing.assert_close(gradient[part], values, rtol=0, atol=1e-9, msg=name)
            gradient[part] = values
    return gradients


def largest_difference(expected, actual):
    """The largest of max|difference| / max|gradient| over all tensors; NaN where a part is missing."""
    assert expected.keys() == actual.keys()
    ratios = [(actual[name] - expected[name]).abs().max() / expected[name].abs().max() for name in expected]
    return torch.stack(ratios).max().item()


def assert_same(actual, expected):
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    assert largest_difference(expected[1], actual[1]) <= 1e-6


@pytest.mark.parametrize("model, task, layout", CASES)
def test_every_layout_has_the_gradient_of_one_process(steps, model, task, layout):
    step, twin = steps(model, task, layout)
    expected_step, expected_twin = steps(model, task, double=not is_fully_sharded(layout))
    if is_fully_sharded(layout) and "tensor_model_parallel_size" in LAYOUTS[layout][1]:
        unsharded = "expert tensor" if "num_moe_experts" in CONFIGS[model] else "tensor and sequence"
        expected_step = steps(model, task, unsharded, double=False)[0]
    assert_same(step, expected_step)
    assert largest_difference(expected_twin[1], twin[1]) > 1e-3


@pytest.mark.parametrize("task", ["mdlm", "bd3lm"])
def test_context_ranks_that_all_count_a_sample_would_be_noticed(steps, task):
    step, twin = steps("dense", task, "context", mutate="counts_of_every_rank")
    expected_step, expected_twin = steps("dense", task)
    assert_same(step, expected_step)
    # Half of every gradient; the reported loss has counts of its own.
    assert largest_difference(expected_twin[1], twin[1]) == pytest.approx(0.5)


@pytest.mark.parametrize("micro_batch_size", [2, 4])
@pytest.mark.parametrize("model, task", [(model, task) for model in MODELS for task in ("mdlm", "bd3lm")])
def test_accumulated_micro_batches_have_the_same_gradient(steps, model, task, micro_batch_size):
    assert_same(steps(model, task, micro_batch_size=micro_batch_size)[0], steps(model, task)[0])


@pytest.mark.parametrize("recomputation", RECOMPUTATIONS)
@pytest.mark.parametrize("model, task", [(model, task) for model in MODELS for task in ("mdlm", "bd3lm")])
def test_recomputed_activations_have_the_same_gradient(steps, model, task, recomputation):
    assert_same(steps(model, task, recomputation=recomputation)[0], steps(model, task)[0])


@pytest.mark.parametrize(
    "layout, recomputation",
    [
        ("pipeline", "full"),
        ("interleaved pipeline", "first layers of a stage"),
        ("context", "full"),
        ("fully sharded", "full"),
        pytest.param("fully sharded", "feed-forward networks", marks=pytest.mark.slow),
        pytest.param("pipeline", "first layers of a stage", marks=pytest.mark.slow),
        pytest.param("pipeline", "selective", marks=pytest.mark.slow),
    ],
)
def test_recomputation_in_a_layout(steps, layout, recomputation):
    """Micro-batches that went on to other stages meanwhile keep their patterns and tokens."""
    model, task = "balanced experts", "bd3lm, documents"
    expected = steps(model, task, double=not is_fully_sharded(layout))
    assert_same(steps(model, task, layout, recomputation=recomputation)[0], expected[0])


def test_shared_experts_while_tokens_travel(steps):
    assert_same(steps("overlapped experts", "bd3lm", "expert")[0], steps("shared experts", "bd3lm")[0])
