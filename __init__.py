"""Diffusion language models for NeMo 2: models, connectors and recipes."""

__version__ = "0.1.0"
