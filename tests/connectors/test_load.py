import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.nemo

TOLERANCE = 2e-5
NAMES = (
    *("qwen3", "qwen3_tied", "qwen3_sharded", "qwen2", "llama", "llama3_rope"),
    *("a2d_qwen3", "a2d_qwen2", "a2d_llama", "sdar", "dream", "llada", "llada_gqa"),
)


def golden(models, name):
    """Inputs and outputs of the bidirectional model; causal families have a suffix for it."""
    tensors = load_file(models / name / "golden.safetensors")
    suffix = "_bidirectional" if "logits_bidirectional" in tensors else ""
    return tensors, {case: tensors[f"{case}logits{suffix}"] for case in ("", "padded_", "pos_")}


def load(core, path):
    from nemo_dllm.connectors.load import load_hf_weights

    load_hf_weights(core, path)
    return core


def export(core):
    from nemo_dllm.connectors.load import export_hf_tensors

    return dict(export_hf_tensors(core))


def weights(path):
    return {name: t for file in path.glob("model*.safetensors") for name, t in load_file(file).items()}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@torch.no_grad()
def logit_errors(core, models, name):
    tensors, expected = golden(models, name)
    real = tensors["padded_attention_mask"].bool()
    logits = {
        "": core(tensors["input_ids"]),
        "padded_": core(tensors["padded_input_ids"], None, real),
        "pos_": core(tensors["input_ids"], tensors["pos_position_ids"]),
    }
    differences = {case: (logits[case] - expected[case]).abs() for case in expected}
    differences["padded_"] = differences["padded_"][real]
    return {case: difference.max().item() for case, difference in differences.items()}


@pytest.mark.parametrize("name", NAMES)
def test_export_gives_every_tensor_back(build_core, models, name):
    assert_equal(export(load(build_core(models / name), models / name)), weights(models / name))


def test_import_of_an_export_is_the_model(build_core, models, tmp_path):
    from nemo_dllm.connectors.checkpoint_files import HFCheckpoint, write_hf_checkpoint
    from nemo_dllm.connectors.load import hf_tensor_headers

    first = load(build_core(models / "qwen3"), models / "qwen3")
    config = HFCheckpoint(models / "qwen3").config
    folder = write_hf_checkpoint(
        tmp_path / "out", config, hf_tensor_headers(first), export(first).items(), max_shard_size=100_000
    )
    second = load(build_core(folder), folder)
    assert_equal(dict(first.named_parameters()), dict(second.named_parameters()))


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_written(build_core, models, name):
    core = load(build_core(models / name), models / name)
    assert not [parameter for parameter, value in core.named_parameters() if value.isnan().any()]


def test_weights_take_the_dtype_of_the_parameters(build_core, models):
    core = load(build_core(models / "qwen3").bfloat16(), models / "qwen3")
    expected = {name: tensor.bfloat16() for name, tensor in weights(models / "qwen3").items()}
    assert_equal(export(core), expected)


def test_tied_embeddings_are_one_tensor(build_core, models):
    core = load(build_core(models / "qwen3_tied"), models / "qwen3_tied")
    assert "lm_head.weight" not in export(core)
    assert "output_layer.weight" not in dict(core.named_parameters())


def test_a_head_in_the_file_of_a_tied_model_must_be_the_embedding(build_core, models, make_twin):
    def add_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    twin = make_twin("qwen3_tied", add_head)
    assert max(logit_errors(load(build_core(twin), twin), models, "qwen3_tied").values()) < TOLERANCE

    def change_head(tensors):
        add_head(tensors)
        tensors["lm_head.weight"][199, 63] += 1e-3

    twin = make_twin("qwen3_tied", change_head, folder="other")
    with pytest.raises(
        ValueError, match="ties the head .* but lm_head.weight differs from model.embed_tokens.weight; set"
    ):
        load(build_core(twin), twin)


class Tokenizer:
    """Makes the vocabulary size come from the tokenizer, padded."""

    vocab_size = 200


@pytest.mark.parametrize("name", ["qwen3", "qwen3_tied"])
@pytest.mark.parametrize(("divisor", "rows"), [(128, 256), (640, 640)])
def test_padding_rows_of_the_vocabulary_are_zero_and_stay(build_core, models, name, divisor, rows):
    core = build_core(models / name, tokenizer=Tokenizer(), vocab_size=None, make_vocab_size_divisible_by=divisor)
    table = load(core, models / name).embedding.word_embeddings.weight
    assert table.shape == (rows, 64)
    assert not table[200:].any()
    assert max(logit_errors(core, models, name).values()) < TOLERANCE
    assert_equal(export(core), weights(models / name))


def test_one_error_names_all_tensors_that_do_not_fit(build_core, models, make_twin):
    def damage(tensors):
        del tensors["model.layers.0.self_attn.q_norm.weight"], tensors["lm_head.weight"]
        tensors["model.layers.0.extra.weight"], tensors["more.weight"] = torch.zeros(1), torch.zeros(1)
        tensors["model.layers.1.mlp.gate_proj.weight"] = torch.zeros(100, 64)
        tensors["model.norm.weight"] = torch.zeros(63)

    twin = make_twin("qwen3", damage)
    core = build_core(models / "qwen3")
    with pytest.raises(ValueError) as error:
        load(core, twin)
    assert str(error.value).splitlines() == [
        f"{twin} does not fit the model (family qwen3):",
        "  tensors that the checkpoint lacks (2): lm_head.weight, model.layers.0.self_attn.q_norm.weight",
        "  tensors that the model has no place for (2): model.layers.0.extra.weight, more.weight",
        "  tensors of another shape (2): model.layers.1.mlp.gate_proj.weight is [100, 64], the model needs [112, 64], "
        "model.norm.weight is [63], the model needs [64]",
    ]
    assert all(parameter.isnan().all() for parameter in core.parameters())


def test_tensors_that_the_rotary_base_implies_are_ignored(build_core, models, make_twin):
    def add_frequencies(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)

    twin = make_twin("qwen3", add_frequencies)
    assert_equal(export(load(build_core(twin), twin)), weights(models / "qwen3"))


def test_names_parameters_that_the_table_does_not_know(build_core, models):
    core = build_core(models / "qwen3", add_qkv_bias=True)
    expected = (
        r"parameters that no tensor of the checkpoint fills \(3\): decoder.layers.0.self_attention.linear_qkv.bias, "
    )
    with pytest.raises(ValueError, match=expected):
        load(core, models / "qwen3")
    with pytest.raises(ValueError, match=expected):
        export(core)


def test_names_parameters_that_the_model_lacks(build_core, models):
    core = build_core(models / "qwen3", qk_layernorm=False)
    with pytest.raises(
        ValueError, match=r"parameters that the model lacks \(6\): decoder.layers.0.self_attention.k_lay"
    ):
        load(core, models / "qwen3")


def test_names_everything_in_which_configuration_and_checkpoint_differ(build_core, models):
    core = build_core(models / "qwen3")
    core.config.rotary_base, core.config.layernorm_epsilon = 1e4, 1e-5
    expected = (
        r"contradicts .*qwen3: layernorm_epsilon=1e-05 \(checkpoint: 1e-06\), rotary_base=10000.0 \(checkpoint: 10"
    )
    with pytest.raises(ValueError, match=expected):
        load(core, models / "qwen3")


def test_refuses_the_configuration_of_no_family(build_core, models):
    from nemo.collections.llm import GPTConfig

    core = build_core(models / "qwen3")
    core.config.__class__ = GPTConfig
    with pytest.raises(ValueError, match=r"no family has the configuration GPTConfig; known: .*Qwen3Config \(qwen3\)"):
        load(core, models / "qwen3")


def test_a_subclass_of_a_known_configuration_is_of_its_family(build_core, models):
    core = build_core(models / "qwen3")
    core.config.__class__ = type("Qwen3ConfigTiny", (type(core.config),), {})
    assert_equal(export(load(core, models / "qwen3")), weights(models / "qwen3"))


def test_layer_norms_are_found_under_the_names_of_transformer_engine(build_core, models):
    """Its fused layers keep the norm in front of a linear layer as that layer's own parameter."""
    core = build_core(models / "qwen3")
    for layer in core.decoder.layers:
        for linear, norm in (
            (layer.self_attention.linear_qkv, "input_layernorm"),
            (layer.mlp.linear_fc1, "pre_mlp_layernorm"),
        ):
            linear.layer_norm_weight = getattr(layer, norm).weight
            setattr(layer, norm, torch.nn.Identity())
    assert_equal(export(load(core, models / "qwen3")), weights(models / "qwen3"))
    assert not [name for name, value in core.named_parameters() if value.isnan().any()]


def test_reads_one_layer_at_a_time(build_core, models, monkeypatch):
    """The largest part read at once is a parameter's, not a file's."""
    from nemo_dllm.connectors.checkpoint_files import HFCheckpoint

    sizes = []
    original = HFCheckpoint.tensor

    def watched(self, *args, **kwargs):
        part = original(self, *args, **kwargs)
        sizes.append(part.numel())
        return part

    core = build_core(models / "qwen3")
    monkeypatch.setattr(HFCheckpoint, "tensor", watched)
    load(core, models / "qwen3")
    assert sum(sizes) == sum(tensor.numel() for tensor in weights(models / "qwen3").values())
    assert max(sizes) <= max(parameter.numel() for parameter in core.parameters())
