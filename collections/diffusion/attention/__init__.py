"""Attention of diffusion language models: mask predicates (torch only) and Megatron core-attention modules."""
