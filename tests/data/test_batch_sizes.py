import pytest

from nemo_dllm.collections.diffusion.data.batch_sizes import check_batch_sizes


def test_multiples_pass():
    check_batch_sizes(24, 2, 4)
    check_batch_sizes(1, 1)


def test_error_names_all_sizes_and_the_nearest_valid_ones():
    message = r"global_batch_size=20 .* micro_batch_size=2 x data_parallel_size=4 = 8; set global_batch_size=16 or 24$"
    with pytest.raises(ValueError, match=message):
        check_batch_sizes(20, 2, 4)
    with pytest.raises(ValueError, match=r"set global_batch_size=8$"):
        check_batch_sizes(4, 2, 4)


@pytest.mark.parametrize("field", ["global_batch_size", "micro_batch_size", "data_parallel_size"])
def test_sizes_below_one(field):
    sizes = {"global_batch_size": 8, "micro_batch_size": 2, "data_parallel_size": 2, field: 0}
    with pytest.raises(ValueError, match=f"{field}=0 must be at least 1"):
        check_batch_sizes(**sizes)
