"""The check before a run: each refusal names the fields, their values and a fix."""

import pytest

pytestmark = pytest.mark.nemo


@pytest.fixture(scope="module")
def check():
    import fiddle as fdl

    from nemo_dllm.recipes.tasks import check_settings

    def run(recipe):
        check_settings(*(fdl.build(getattr(recipe, field)) for field in ("model", "data", "trainer")))

    return run


def test_devices_that_the_model_does_not_divide(check, tiny):
    tiny.trainer.devices, tiny.trainer.num_nodes = 6, 3
    tiny.trainer.strategy.tensor_model_parallel_size = 2
    tiny.trainer.strategy.pipeline_model_parallel_size = 2
    with pytest.raises(
        ValueError,
        match="trainer.devices x trainer.num_nodes = 6 x 3 = 18 is not divisible by tensor x pipeline x context "
        "parallel size = 2 x 2 x 1 = 4; change trainer.devices or the sizes of trainer.strategy: the nearest is "
        "trainer.devices=4",
    ):
        check(tiny)
    tiny.trainer.num_nodes = 10
    tiny.data.micro_batch_size, tiny.data.global_batch_size = 2, 90
    check(tiny)


@pytest.mark.parametrize("global_batch_size, nearest", [(48, "32 or 64"), (16, "32"), (80, "64 or 96"), (64, None)])
def test_batch_that_the_ranks_do_not_divide(check, tiny, global_batch_size, nearest):
    """Four devices, two to a model: two ranks read micro-batches of 16."""
    tiny.trainer.devices = 4
    tiny.trainer.strategy.tensor_model_parallel_size = 2
    tiny.data.micro_batch_size, tiny.data.global_batch_size = 16, global_batch_size
    if nearest is None:
        check(tiny)
        return
    with pytest.raises(
        ValueError,
        match=f"global_batch_size={global_batch_size} is not a multiple of micro_batch_size=16 x data_parallel_size=2 "
        f"= 32; set global_batch_size={nearest}$",
    ):
        check(tiny)


def test_sequence_longer_than_the_positions(check, tiny):
    tiny.model.config.max_position_embeddings = 128
    check(tiny)
    tiny.data.seq_length = 129
    with pytest.raises(
        ValueError,
        match="data.seq_length=129 is longer than the model's positions, model.config.max_position_embeddings=128; "
        "choose a shorter sequence",
    ):
        check(tiny)


def test_sequence_longer_than_the_table_of_learned_positions(check, tiny):
    tiny.model.config.position_embedding_type = "learned_absolute"
    check(tiny)
    tiny.data.seq_length = 129
    with pytest.raises(ValueError, match="data.seq_length=129 is longer .*, model.config.seq_length=128; choose"):
        check(tiny)


@pytest.mark.parametrize("position_embedding_type, length", [("rope", 64), ("learned_absolute", 128)])
def test_checkpoints_say_how_long_the_samples_were(tiny, position_embedding_type, length):
    import fiddle as fdl

    from nemo_dllm.recipes.tasks import set_context

    tiny.model.config.position_embedding_type = position_embedding_type
    model = fdl.build(tiny.model)
    set_context(model, seq_length=64)
    assert model.config.seq_length == fdl.build(model.__io__.config).seq_length == length


@pytest.mark.parametrize(
    "field, value, text",
    [
        (
            "model.config.num_attention_heads",
            5,
            "num_attention_heads=5 is not divisible by model.config.num_query_groups=2",
        ),
        (
            "trainer.strategy.tensor_model_parallel_size",
            3,
            "num_attention_heads=4 is not divisible by trainer.strategy",
        ),
        ("trainer.strategy.tensor_model_parallel_size", 4, "num_query_groups=2 is not divisible by trainer.strategy"),
        ("trainer.strategy.pipeline_model_parallel_size", 3, "num_layers=4 is not divisible by trainer.strategy"),
        ("trainer.max_steps", 0, "trainer.max_steps=0 must be the number of optimizer steps, at least 1"),
        (
            "trainer.val_check_interval",
            0,
            "val_check_interval=0 must be .*; trainer.limit_val_batches=0 leaves them out",
        ),
        ("trainer.log_every_n_steps", 0, "trainer.log_every_n_steps=0 must be at least 1"),
        ("trainer.strategy.tensor_model_parallel_size", 0, "trainer.strategy.tensor_.*_size=0 must be at least 1"),
        ("trainer.strategy.context_parallel_size", -2, "trainer.strategy.context_parallel_size=-2 must be at least 1"),
        ("model.config.hidden_size", 0, "model.config.hidden_size=0 must be at least 1"),
        ("model.config.num_attention_heads", 0, "model.config.num_attention_heads=0 must be at least 1"),
        ("model.config.kv_channels", 47, "model.config.kv_channels=47 must be even: rotary embeddings turn pairs"),
        (
            "trainer.limit_train_batches",
            3,
            "limit_train_batches=3 would feed the same samples .* set trainer.max_steps",
        ),
    ],
)
def test_sizes_that_do_not_go_together(check, tiny, field, value, text):
    tiny.trainer.devices = 12
    tiny.data.micro_batch_size, tiny.data.global_batch_size = 1, 12
    check(tiny)
    *parents, name = field.split(".")
    target = tiny
    for parent in parents:
        target = getattr(target, parent)
    setattr(target, name, value)
    with pytest.raises(ValueError, match=text):
        check(tiny)


def test_fp8_needs_transformer_engine(check, tiny, monkeypatch):
    from nemo_dllm.recipes import tasks
    from nemo_dllm.recipes.builder import set_precision

    set_precision(tiny, "fp8")
    monkeypatch.setattr(tasks, "have_transformer_engine", lambda: True)
    check(tiny)
    monkeypatch.setattr(tasks, "have_transformer_engine", lambda: False)
    with pytest.raises(
        ValueError, match="fp8 needs Transformer Engine, which is not installed; install the extra `te`"
    ):
        check(tiny)


def test_fp8_needs_the_layers_of_transformer_engine(check, tiny, monkeypatch):
    from nemo_dllm.recipes import tasks
    from nemo_dllm.recipes.builder import set_precision

    set_precision(tiny, "fp8")
    tiny.model.transformer_impl = "local"
    monkeypatch.setattr(tasks, "have_transformer_engine", lambda: True)
    with pytest.raises(ValueError, match="model.transformer_impl='local'; set it to 'transformer_engine'"):
        check(tiny)


def test_sequence_that_sequence_parallelism_cannot_cut(check, tiny):
    tiny.trainer.devices = 2
    tiny.trainer.strategy.tensor_model_parallel_size = 2
    tiny.trainer.strategy.sequence_parallel = True
    check(tiny)
    tiny.data.seq_length = 127
    with pytest.raises(ValueError, match="data.seq_length=127 is not divisible by trainer.strategy.tensor"):
        check(tiny)


@pytest.fixture
def supervised(tiny):
    """The smallest recipe on supervised samples, spread over four devices."""
    import nemo_run as run

    from nemo_dllm.collections.diffusion.data.supervised_datamodule import SupervisedDataModule

    tiny.data = run.Config(SupervisedDataModule, seq_length=128, micro_batch_size=2, global_batch_size=8)
    tiny.trainer.devices = 4
    return tiny


def test_rows_of_many_lengths_do_not_pass_pipeline_stages(check, supervised):
    supervised.data.pad_to_multiple_of = 32
    check(supervised)
    supervised.trainer.strategy.pipeline_model_parallel_size = 2
    with pytest.raises(
        ValueError,
        match="data.pad_to_multiple_of=32 makes rows of different lengths, which the "
        "trainer.strategy.pipeline_model_parallel_size=2 stages cannot exchange; set it to None",
    ):
        check(supervised)
    supervised.data.pad_to_multiple_of = None
    check(supervised)


def test_rows_of_many_lengths_are_cut_by_sequence_parallelism(check, supervised):
    supervised.trainer.strategy.tensor_model_parallel_size = 2
    supervised.data.pad_to_multiple_of = 1
    check(supervised)
    supervised.trainer.strategy.sequence_parallel = True
    with pytest.raises(
        ValueError,
        match="data.pad_to_multiple_of=1 is not divisible by trainer.strategy.tensor_model_parallel_size=2, into which",
    ):
        check(supervised)
    supervised.data.pad_to_multiple_of = 2
    check(supervised)


def test_packed_samples_end_where_blocks_end(check, supervised, recipes):
    supervised.model = recipes["bd3lm_tiny"].model
    check(supervised)
    supervised.data.packing = True
    for block_size in (None, 4):
        supervised.data.block_size = block_size
        with pytest.raises(
            ValueError,
            match=f"data.packing=True puts samples side by side .* data.block_size={block_size} they do not end where "
            "blocks of model.objective.block_size=8 do; set data.block_size=8",
        ):
            check(supervised)
    for block_size in (8, 16):
        supervised.data.block_size = block_size
        check(supervised)


def test_misspelt_field_of_the_strategy(check, tiny):
    """The strategy takes any keyword, so neither nemo_run nor NeMo would say a word."""
    tiny.trainer.strategy.tensor_model_paralel_size = 2
    with pytest.raises(
        ValueError,
        match="trainer.strategy has no field tensor_model_paralel_size; did you mean tensor_model_parallel_size or",
    ):
        check(tiny)


def test_what_torch_itself_takes_is_let_through(check, tiny):
    tiny.trainer.strategy.find_unused_parameters = False
    check(tiny)


@pytest.mark.parametrize(
    "owner, field, value, text",
    [
        ("config", "lr", -1.0, "optim.config.lr=-1.0 must be at least 0 and finite"),
        ("config", "lr", float("nan"), "optim.config.lr=nan must be at least 0 and finite"),
        ("config", "optimizer", "lion", "optim.config.optimizer='lion' is unknown; choose from adam, sgd"),
        ("lr_scheduler", "warmup_steps", -1, "optim.lr_scheduler.warmup_steps=-1 must be at least 0"),
    ],
)
def test_optimizers_that_would_not_learn(tiny, tmp_path, owner, field, value, text):
    import fiddle as fdl

    from nemo_dllm.recipes import tasks

    tiny.log.log_dir = str(tmp_path)
    setattr(getattr(tiny.optim, owner), field, value)
    with pytest.raises(ValueError, match=text):
        tasks.pretrain(**fdl.build(tiny).keywords)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("task", ["pretrain", "finetune"])
def test_both_tasks_check_before_they_build(task, tiny, tmp_path):
    import fiddle as fdl

    from nemo_dllm.recipes import tasks

    tiny.log.log_dir = str(tmp_path)
    tiny.data.seq_length = 10**6
    built = fdl.build(tiny).keywords
    with pytest.raises(ValueError, match="data.seq_length=1000000 is longer"):
        getattr(tasks, task)(**built)
    assert not hasattr(built["model"], "module")
    assert list(tmp_path.iterdir()) == []


def test_adapters_that_cannot_be_trained_or_merged(tiny, monkeypatch):
    import fiddle as fdl
    from nemo.collections.llm.peft import LoRA as NeMoLoRA

    from nemo_dllm.collections.diffusion.models.lora import LoRA
    from nemo_dllm.recipes import tasks

    monkeypatch.setattr(tasks, "have_transformer_engine", lambda: False)
    built = fdl.build(tiny).keywords
    with pytest.raises(ValueError, match="LoRA needs Transformer Engine's layers; take LoRA of nemo_dllm"):
        tasks.finetune(**built, peft=NeMoLoRA())
    with pytest.raises(ValueError, match="peft adapts a trained model, and init_from is None, which is random weights"):
        tasks.finetune(**built, peft=LoRA())
    built["model"].config.num_moe_experts = 4
    experts = r"peft.target_modules=\['linear_qkv', 'linear_proj', 'linear_fc1', 'linear_fc2'\] would adapt layers of"
    with pytest.raises(ValueError, match=experts + r".*set peft.target_modules=\['linear_qkv', 'linear_proj'\]"):
        tasks.finetune(**built, peft=LoRA(), init_from="hf://name")
    with pytest.raises(ValueError, match=r"target_modules=\['\*.layers.1.mlp.experts.\*'\] would adapt"):
        tasks.finetune(**built, peft=LoRA(target_modules=["*.layers.1.mlp.experts.*"]), init_from="hf://name")
    # Others may be.
    LoRA(target_modules=["linear_qkv", "*.shared_experts.linear_fc1"]).check_fits(built["model"].config)


def test_no_experts_are_none(tiny):
    """Set on a model that is there; Megatron's configuration lets no 0 in."""
    import fiddle as fdl

    from nemo_dllm.recipes.tasks import check_settings

    model, data, trainer = (fdl.build(getattr(tiny, field)) for field in ("model", "data", "trainer"))
    model.config.num_moe_experts = 0
    with pytest.raises(ValueError, match="num_moe_experts=0 must be at least 1, or None; set .*num_moe_experts=None$"):
        check_settings(model, data, trainer)
