"""The benchmark of sampling, on a CPU."""

import json

import pytest
import torch

pytestmark = pytest.mark.nemo


@pytest.fixture(scope="module")
def benchmark(import_benchmark):
    return import_benchmark("sample")


def test_bytes_and_operations_by_hand(benchmark):
    model = benchmark.build(benchmark.SHAPES["tiny"], 4, layers=1)
    rows, positions, keys, scored = 3, 4, 20, 4
    hidden, ffn, heads, groups, size, vocab = 32, 64, 4, 2, 8, 128
    matrices = hidden * (heads + 2 * groups) * size + heads * size * hidden + 3 * hidden * ffn
    norms = 3 * hidden + 2 * size
    moved, operations = benchmark.pass_cost(model.core, rows, positions, keys, scored)
    element = 2 if torch.cuda.is_available() else 4
    cached = rows * keys * 2 * groups * size
    assert moved == element * (matrices + norms + hidden * vocab + cached + rows * scored * vocab)
    attention = 4 * rows * heads * positions * keys * size
    assert operations == 2 * rows * (positions * matrices + scored * hidden * vocab) + attention


@pytest.mark.parametrize(
    "shape, caches", [("tiny", ["exact"]), ("tiny_canvas", ["None", "approximate_dual", "approximate_delayed"])]
)
def test_a_table(benchmark, tmp_path, capsys, shape, caches):
    options = ["--context", "32", "--new-tokens", "32", "--json", str(tmp_path / "rows.json")]
    names = ["none" if cache == "None" else cache for cache in caches]
    benchmark.main([shape, "--batch", "1", "3", *options, "--caches", *names])
    rows = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    assert len(rows) == 2 * (2 + 3 * len(caches))
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert table[0] == list(benchmark.COLUMNS) and set(table[1]) == {"---"}
    assert table[2:] == [[str(row.get(name, "")) for name in benchmark.COLUMNS] for row in rows]
    for batch in (1, 3):
        of_batch = [row for row in rows if row["rows"] == batch]
        size = 4 if shape == "tiny" else 32
        assert [row["what"] for row in of_batch[:2]] == ["canvas of 64", f"block of {size}"]
        assert all(row["ms"] > 0 and row["bound by"] in ("memory", "compute") for row in of_batch[:2])
        forwards = {row["what"]: row["forwards"] for row in of_batch[2:]}
        assert forwards == {
            f"sampler, {committed} per forward, cache {cache}": 32 // committed
            for cache in caches
            for committed in (1, 2, 4)
        }
        for row in of_batch[2:]:
            assert 0 < float(row["overhead"].removesuffix(" %")) < 100
            assert row["tokens/s"] == pytest.approx(32 * batch / row["s"], rel=0.05)
