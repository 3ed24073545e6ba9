"""Which batch sizes fit together."""


def check_batch_sizes(global_batch_size: int, micro_batch_size: int, data_parallel_size: int = 1) -> None:
    """Check that every data-parallel rank gets the same whole number of micro-batches per optimizer step.

    Args:
        global_batch_size: samples per optimizer step.
        micro_batch_size: samples per forward pass of one rank.
        data_parallel_size: ranks that read different samples.

    Raises:
        ValueError: one of them is below 1, or the first is not a multiple of the product of the others.
    """
    sizes = {
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size,
        "data_parallel_size": data_parallel_size,
    }
    for field, size in sizes.items():
        if size < 1:
            raise ValueError(f"{field}={size} must be at least 1")
    samples = micro_batch_size * data_parallel_size
    if global_batch_size % samples:
        below = global_batch_size // samples * samples
        nearest = " or ".join(str(size) for size in (below, below + samples) if size)
        raise ValueError(
            f"global_batch_size={global_batch_size} is not a multiple of "
            f"micro_batch_size={micro_batch_size} x data_parallel_size={data_parallel_size} = {samples}; "
            f"set global_batch_size={nearest}"
        )
