"""A degree of parallelism is a number of ranks, and nothing else."""

import pytest

pytestmark = pytest.mark.nemo

EXPERTS = {
    "model.config.num_moe_experts": 6,
    "model.config.moe_ffn_hidden_size": 96,
    "model.config.moe_router_topk": 2,
}
VIRTUAL = "virtual_pipeline_model_parallel_size"
DEGREES = {
    "tensor_model_parallel_size": "1",
    "pipeline_model_parallel_size": "1",
    VIRTUAL: "2, or None",
    "context_parallel_size": "1",
    "expert_model_parallel_size": "1",
    "expert_tensor_parallel_size": "1, or None",
}


@pytest.mark.parametrize(
    "value, nearest", [(0, 1), (-2, 1), (True, 1), (False, 1), ("2", 2), ("two", 1), (2.0, 2), (1.5, 2), ([2], 1)]
)
@pytest.mark.parametrize("degree", DEGREES)
def test_what_is_no_degree(check_sizes, degree, value, nearest):
    means_none = degree == VIRTUAL and nearest == 1 or "None" in DEGREES[degree] and value in (0, -2)
    nearest = None if means_none else nearest
    text = rf"{degree}={value!r} must be .*at least {DEGREES[degree]}; set .*{degree}={nearest}$"
    with pytest.raises(ValueError, match=text.replace("[", r"\[")):
        check_sizes({degree: value}, EXPERTS)


def test_a_single_chunk_is_none(check_sizes):
    with pytest.raises(ValueError, match=f"{VIRTUAL}=1 must be at least 2, or None; set .*{VIRTUAL}=None"):
        check_sizes({"pipeline_model_parallel_size": 2, VIRTUAL: 1}, {})


@pytest.mark.parametrize("degree", DEGREES)
def test_degrees_that_may_be_left_out(check_sizes, degree):
    if "None" in DEGREES[degree]:
        check_sizes({degree: None}, EXPERTS)
        return
    with pytest.raises(ValueError, match=f"{degree}=None must be a whole number of at least 1; set .*{degree}=1"):
        check_sizes({degree: None}, EXPERTS)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_sequence_parallelism_is_on_or_off(check_sizes, value):
    with pytest.raises(ValueError, match=f"sequence_parallel={value!r} must be True or False"):
        check_sizes({"tensor_model_parallel_size": 2, "sequence_parallel": value}, {})
