"""Hugging Face checkpoints to NeMo models and back: one key table per family, read in both directions."""
