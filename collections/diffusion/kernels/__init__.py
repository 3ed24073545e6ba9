"""Triton kernels for what would otherwise dominate a step. Imported only where a GPU is used."""
