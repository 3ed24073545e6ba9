"""What a recipe needs of a GPU's memory, from sizes alone."""

from dataclasses import dataclass

from nemo.collections.llm import GPTConfig

from nemo_dllm.collections.diffusion.models.head import DEFAULT_CHUNK
from nemo_dllm.recipes.builder import Layout


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest GPU: of the first or the last pipeline stage, which holds a table beside its layers."""

    weights: float
    """bf16."""
    gradients: float
    """fp32."""
    optimizer: float
    """fp32 weights and Adam's two moments, split over the ranks that read different data."""
    activations: float
    """bf16, without recomputation, of all micro-batches under way."""
    head: float
    """One chunk of logits in bf16; gradient of the head's weights in fp32 and in bf16."""

    @property
    def total(self) -> float:
        """Sum of all, bytes. The CUDA context, NCCL's buffers and fragmentation come on top."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.head


def estimate_memory(config: GPTConfig, parameters: int, layout: Layout, positions: int) -> MemoryEstimate:
    """Estimate for training a dense model in bf16 with the distributed optimizer.

    Checked against two measurements (docs/recipes.md): 2 % below both.

    Args:
        config: the model's configuration, gated MLP.
        parameters: of the whole model, a tied table counted once.
        layout: how the model is spread.
        positions: that the layers see per micro-batch; block diffusion's [noised | clean] rows have twice their tokens.
    """
    table = config.vocab_size * config.hidden_size
    tables = table if config.share_embeddings_and_output_weights else 2 * table
    held = (parameters - tables) / layout.pipeline + (tables if layout.pipeline == 1 else table)
    held /= layout.tensor
    data_ranks = layout.num_nodes * layout.gpus_per_node // (layout.tensor * layout.pipeline)
    return MemoryEstimate(
        weights=2 * held,
        gradients=4 * held,
        optimizer=12 * held / data_ranks,
        # As many micro-batches are under way as there are stages, each in one stage's share of the layers.
        activations=positions * config.num_layers * layer_bytes_per_position(config) / layout.tensor,
        head=(2 * DEFAULT_CHUNK * config.vocab_size + 6 * table) / layout.tensor,
    )


def layer_bytes_per_position(config: GPTConfig) -> int:
    """Bytes that one dense layer keeps of one position for its backward pass.

    Two bytes each of: two residuals and two norms' outputs; the fused projection and, rotated, queries, keys and
    values; attention's output; the two halves of the MLP's first product, and their product.
    """
    queries = config.num_attention_heads * config.kv_channels
    keys = config.num_query_groups * config.kv_channels
    return 2 * (4 * config.hidden_size + 2 * (queries + 2 * keys) + queries + 3 * config.ffn_hidden_size)
