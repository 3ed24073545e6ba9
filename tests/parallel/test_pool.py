"""A rank that is silent or dead is told from one that raises, with where it was; groups of a run have one worker."""

import pytest
import torch

pytestmark = pytest.mark.nemo


@pytest.fixture
def pool(start_pool):
    """Two processes that nothing has run in."""
    return start_pool(2)


def failure(pool, function, **arguments):
    with pytest.raises(pytest.fail.Exception) as failed:
        pool.run(function, module="pool_jobs", **arguments)
    assert not pool.processes
    return failed.value.msg


def test_a_rank_that_sleeps_shows_where(pool):
    message = failure(pool, "sleep", sleeper=1, timeout=3)
    assert "Rank 0" not in message
    assert "No answer within 3 seconds.\nRank 1 goes on:" in message
    assert "in sleep_deeply" in message and "pool_jobs.py" in message


def test_ranks_that_wait_for_each_other_show_where(pool):
    message = failure(pool, "wait_crosswise", timeout=3)
    assert "No answer within 3 seconds.\nRank 0 goes on:" in message and "Rank 1 goes on:" in message
    assert message.count("in wait_crosswise") == 2


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL"])
def test_a_rank_that_dies_is_named(pool, name):
    message = failure(pool, "die", victim=0, signal_name=name)
    # The other rank may have been told by its barrier, and have raised, before.
    _, fate = message.split(f"Rank 0 was ended by {name}:\n")
    assert "No answer" not in message
    assert ("in die" in fate) == (name == "SIGSEGV")


def test_a_rank_that_died_after_its_answer_is_named(pool):
    assert pool.run("answer_and_die", module="pool_jobs", victim=1) == [0, 1]
    pool.processes[1].join(60)
    message = failure(pool, "answer_and_die", victim=1)
    assert "Rank 1 was ended by SIGKILL" in message


def test_a_rank_that_raises_is_told_alone(pool):
    message = failure(pool, "fail", victim=1)
    assert "ValueError: rank 1 of 2" in message and "Rank" not in message


def test_groups_of_a_run_have_one_worker(pool):
    """Two could both free the name of a coalesced gather. The trainer makes groups before a model is configured."""
    config = {
        "num_layers": 1,
        "hidden_size": 16,
        "ffn_hidden_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 200,
        "seq_length": 8,
    }
    first, second = pool.run(
        "workers",
        rows={"tokens": torch.zeros(2, 8, dtype=torch.int64), "loss_mask": torch.ones(2, 8, dtype=torch.bool)},
        config=config,
        objective=("mdlm", {}),
        layout={"fsdp": "megatron"},
        micro_batch_size=1,
        mutate="noise_by_rank",
        double=False,
        distributed=True,
    )
    assert set(first) == set(second) == {1}
    assert len(first) > 10
