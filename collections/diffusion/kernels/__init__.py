"""Triton kernels for pointwise work that would otherwise dominate a step. Imported only where a GPU is used."""
