"""Modelling code that exports bring along. Each file stands alone: it needs torch and transformers only."""

from pathlib import Path

A2D = Path(__file__).with_name("modeling_a2d.py")
