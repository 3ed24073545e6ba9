"""Sharded weights, recomputation and overlap that do not go with a model or a layout are refused before a run."""

import pytest

pytestmark = pytest.mark.nemo

FSDP = {"trainer.strategy.fsdp": "megatron"}
EXPERTS = {
    "model.config.num_moe_experts": 6,
    "model.config.moe_ffn_hidden_size": 96,
    "model.config.moe_router_topk": 2,
}
FULL = {"model.config.recompute_granularity": "full", "model.config.recompute_method": "uniform"}
SELECTIVE = {"model.config.recompute_granularity": "selective"}
PIPELINE = {"trainer.strategy.pipeline_model_parallel_size": 2}
SEQUENCE = {"trainer.strategy.tensor_model_parallel_size": 2, "trainer.strategy.sequence_parallel": True}
LOCAL = {"model.transformer_impl": "local"}
# The recipe has 4 layers, and runs here on 12 devices.
CASES = {
    "sharded stages": (
        FSDP | PIPELINE,
        "fsdp='megatron' cannot be combined with .*pipeline_model_parallel_size=2; set .*=1, or fsdp=None",
    ),
    "sharded experts on other ranks": (
        FSDP | EXPERTS | {"trainer.strategy.expert_model_parallel_size": 2},
        "fsdp='megatron' cannot be combined with trainer.strategy.expert_model_parallel_size=2; set .*=1, or fsdp=None",
    ),
    "sharded experts, whole on tensor-parallel ranks": (
        FSDP | EXPERTS | SEQUENCE | {"trainer.strategy.expert_tensor_parallel_size": 1},
        "cannot be combined with trainer.strategy.expert_tensor_parallel_size=1; set expert_tensor_parallel_size=2",
    ),
    "several copies of sharded optimizers": (
        FSDP | {"trainer.strategy.num_distributed_optimizer_instances": 2},
        "cannot be combined with trainer.strategy.num_distributed_optimizer_instances=2",
    ),
    "sharded optimizer state only": (
        FSDP | {"trainer.strategy.ddp.data_parallel_sharding_strategy": "optim"},
        "data_parallel_sharding_strategy='optim' is not supported; set it to 'optim_grads_params'",
    ),
    "sharded weights in CUDA graphs": (
        FSDP | {"model.config.cuda_graph_impl": "local"},
        "model.config.cuda_graph_impl='local' does not follow; set cuda_graph_impl='none', or fsdp=None",
    ),
    "no layer recomputed": (
        FULL | {"model.config.recompute_num_layers": 0},
        "recompute_num_layers=0 must be at least 1; set model.config.recompute_num_layers=1",
    ),
    "more layers recomputed than a stage has": (
        FULL | PIPELINE | {"model.config.recompute_num_layers": 3},
        "recompute_num_layers=3 must be between 1 and the 2 layers of a pipeline stage .*; set it to 2",
    ),
    "a text for a number of layers": (
        FULL | {"model.config.recompute_num_layers": "2"},
        "recompute_num_layers='2' must be a whole number of at least 1; set model.config.recompute_num_layers=2",
    ),
    "a balance that there is not": (
        EXPERTS
        | {
            "model.config.moe_router_load_balancing_type": ["seq_aux_loss", "aux"],
            "model.config.moe_aux_loss_coeff": [0.1, 0.1],
        },
        r"moe_router_load_balancing_type=\['seq_aux_loss', 'aux'\] is unknown; choose from aux_loss, seq_aux_loss, ",
    ),
    "a dispatcher that there is not": (
        EXPERTS | {"model.config.moe_token_dispatcher_type": "ring"},
        "moe_token_dispatcher_type='ring' is unknown; choose from allgather, alltoall, flex",
    ),
    "norms recomputed": (
        SELECTIVE | LOCAL | {"model.config.recompute_modules": ["core_attn", "layernorm"]},
        r"recompute_modules=\['core_attn', 'layernorm'\] needs Transformer Engine's layers for layernorm; .*leave them",
    ),
    "overlapped tensor parallelism of local layers": (
        LOCAL | SEQUENCE | {"model.config.tp_comm_overlap": True},
        "model.config.tp_comm_overlap=True needs Transformer Engine's layers; .*, or set it to False",
    ),
    "overlapped messages of a plain pipeline": (
        PIPELINE | {"model.config.overlap_p2p_comm": True},
        "overlap_p2p_comm=True needs .*virtual_pipeline_model_parallel_size above 1, .* set overlap_p2p_comm=False",
    ),
    "gathering without reducing": (
        {"trainer.strategy.ddp.overlap_param_gather": True, "trainer.strategy.ddp.overlap_grad_reduce": False},
        "ddp.overlap_param_gather=True needs .*ddp.overlap_grad_reduce=True, which is False; set both or neither",
    ),
}


@pytest.fixture(scope="module")
def check():
    import fiddle as fdl

    from nemo_dllm.recipes.tasks import check_settings
    from nemo_dllm.recipes.tiny import mdlm_tiny

    def run(edits, later=()):
        recipe = mdlm_tiny()
        recipe.trainer.devices = 12
        recipe.data.micro_batch_size, recipe.data.global_batch_size = 1, 24
        for field, value in edits.items():
            *path, name = field.split(".")
            target = recipe
            for part in path:
                target = getattr(target, part)
            setattr(target, name, value)
        model, data, trainer = (fdl.build(getattr(recipe, part)) for part in ("model", "data", "trainer"))
        for field, value in dict(later).items():
            setattr(model.config, field, value)
        check_settings(model, data, trainer)

    return run


@pytest.mark.parametrize("edits, text", CASES.values(), ids=CASES)
def test_what_does_not_go_together(check, edits, text):
    with pytest.raises(ValueError, match=text):
        check(edits)


@pytest.mark.parametrize(
    "edits",
    [
        FSDP,
        FSDP | SEQUENCE | {"trainer.strategy.context_parallel_size": 2},
        FSDP | EXPERTS,
        FULL | PIPELINE | {"model.config.recompute_num_layers": 2},
        SELECTIVE | {"model.config.recompute_modules": ["core_attn", "mlp"]},
        {"trainer.strategy.ddp.overlap_param_gather": True, "trainer.strategy.ddp.overlap_grad_reduce": True},
    ],
    ids=["sharded", "sharded, tensor, context", "sharded experts", "half of the layers", "two modules", "overlap"],
)
def test_what_does(check, edits):
    check(edits)


def test_experts_of_two_micro_batches_are_not_overlapped(check):
    """Megatron's own check stands where a configuration is made; callbacks set the field later."""
    with pytest.raises(ValueError, match="overlap_moe_expert_parallel_comm=True .* set it to False; moe_shared_expert"):
        check(EXPERTS, later={"overlap_moe_expert_parallel_comm": True})


def test_sharded_weights_need_the_order_of_streams_free(check, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ValueError, match="CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment .*; unset it"):
        check(FSDP)


def test_sharded_weights_need_the_distributed_optimizer():
    import nemo.lightning as nl

    from nemo_dllm.collections.diffusion.models.fsdp import prepare_fully_sharded

    with pytest.raises(ValueError, match="optim.config.use_distributed_optimizer=False; set it to True"):
        prepare_fully_sharded(nl.MegatronStrategy(fsdp="megatron"))


def test_adapters_are_not_sharded():
    import fiddle as fdl

    from nemo_dllm.collections.diffusion.models.lora import LoRA
    from nemo_dllm.recipes.tasks import finetune
    from nemo_dllm.recipes.tiny import mdlm_tiny

    recipe = mdlm_tiny()
    recipe.trainer.strategy.fsdp = "megatron"
    model, data, trainer = (fdl.build(getattr(recipe, part)) for part in ("model", "data", "trainer"))
    with pytest.raises(ValueError, match="peft .*fsdp='megatron' does not shard; set fsdp=None"):
        finetune(model, data, trainer, peft=LoRA())
