"""The benchmark of a server's engine, on a CPU."""

import json

import pytest

pytestmark = pytest.mark.nemo


@pytest.fixture(scope="module")
def benchmark(import_benchmark):
    return import_benchmark("serve")


def test_a_table(benchmark, tmp_path, capsys):
    lengths = ["--prompt", "4", "20", "--new-tokens", "4", "12", "--each", "3"]
    benchmark.main(["tiny", "--clients", "1", "4", *lengths, "--json", str(tmp_path / "rows.json")])
    rows = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert table[0] == list(benchmark.COLUMNS) and set(table[1]) == {"---"}
    assert table[2:] == [[str(cell) for cell in row.values()] for row in rows]
    assert [row["clients"] for row in rows] == [1, 4]
    assert rows[0]["rows per pass"] == 1 and 1 < rows[1]["rows per pass"] <= 4
    for row in rows:
        assert row["tokens/s"] > 0 and row["in batches"] > 0 and row["ms per pass"] > 0
        assert 0 < row["first text s, median"] <= row["answer s, median"] <= row["answer s, 95 %"]


def test_every_request_is_answered_once_in_full(benchmark):
    class Engine:
        """Answers at once."""

        def __init__(self):
            self.asked = []

        def submit(self, rows):
            (row,) = rows
            self.asked.append((list(row.prefix), row.hole_count))
            row.deliver(benchmark.RowUpdate([1], None))
            row.deliver(benchmark.RowUpdate([1] * row.hole_count, "length"))

    requests = [([seed], 2 + seed) for seed in range(7)]
    engine = Engine()
    clients = benchmark.Clients(engine, requests, benchmark.SamplerConfig())
    assert clients.run(3) >= 0
    assert engine.asked == requests and len(clients.first) == len(clients.last) == 7


def test_a_failed_request_ends_the_benchmark(benchmark):
    class Engine:
        def submit(self, rows):
            rows[0].deliver(benchmark.RowUpdate([], error=RuntimeError("out of memory")))

    with pytest.raises(RuntimeError, match="out of memory"):
        benchmark.Clients(Engine(), [([1], 2)] * 3, benchmark.SamplerConfig()).run(2)
