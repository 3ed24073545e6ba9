"""Autoregressive models of transformers as diffusion models: the layout of dllm, and code to load it without dllm."""

from nemo_dllm.connectors import modeling
from nemo_dllm.connectors.family import HFClass, ModelingCode


def a2d_class(base: str) -> HFClass:
    """The diffusion class with the keys of an autoregressive one.

    Args:
        base: ``Qwen3``, ``Qwen3Moe``, ``Qwen2`` or ``Llama``, as ``connectors/modeling/modeling_a2d.py`` has them.
    """
    architecture = f"A2D{base}LMHeadModel"
    model = f"{modeling.A2D.stem}.{architecture}"
    # AutoModel is the model with its head, as in dllm. There is no AutoModelForCausalLM: it promises ``generate``.
    auto_map = {
        "AutoConfig": f"{modeling.A2D.stem}.A2D{base}Config",
        "AutoModel": model,
        "AutoModelForMaskedLM": model,
    }
    return HFClass(f"a2d-{base.lower()}", architecture, "bidirectional", ModelingCode(modeling.A2D, auto_map))
