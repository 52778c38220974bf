"""The benchmark's figures, and the files that it leaves."""

import csv
import json
import sys
from pathlib import Path
from statistics import median

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))

from bench.support import check, timing
from bench.support.shapes import SUITES, Shape, decode, square


@pytest.fixture
def main(monkeypatch, threads):
    """The command, with a suite of small shapes."""
    pytest.importorskip("matplotlib")
    from bench.throughput import main

    small = (
        *square("forward", (16, 32), dims=(8,)),
        *square("forward + backward", (16,), dims=(8,)),
        *decode((64,), batches=(2,), heads_kv=(8,)),
    )
    monkeypatch.setitem(SUITES, "quick", small)
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0.0001)
    monkeypatch.setattr(timing, "PAUSE_SECONDS", 0)
    return lambda *argv: main(["--device", "cpu", "--rounds", "5", *argv])


@pytest.mark.parametrize("queries, keys", [(7, 7), (3, 7), (7, 3)])
def test_work_is_counted_exactly(queries, keys):
    full, causal = (Shape("forward", 2, 4, 2, queries, keys, 8, causal) for causal in (False, True))
    seen = sum(j <= i + keys - queries for i in range(queries) for j in range(keys))
    assert causal.visible == seen == (~causal.hidden(torch.arange(queries))).sum()
    assert causal.flops == 2 * 4 * seen * (2 * 8 + 2 * 8)
    assert full.flops == 2 * 4 * queries * keys * (2 * 8 + 2 * 8)
    inputs = full.inputs(torch.bfloat16, "cpu")
    assert full.kv_bytes(torch.bfloat16) == inputs.key.nbytes + inputs.value.nbytes


def test_files_agree(main, tmp_path, capsys):
    main("--dtype", "bfloat16", "--suite", "quick", "--out", str(tmp_path))
    said = capsys.readouterr().out
    assert "correct in all 7 cases" in said

    stem = tmp_path / "throughput-cpu-quick"
    record = json.loads(stem.with_suffix(".json").read_text())
    assert record["machine"]["threads"] == torch.get_num_threads()
    assert "--dtype bfloat16" in record["command"]
    assert len(record["results"]) == 7
    with stem.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(5 * (len(result["seconds"]) + 1) for result in record["results"])
    for result in record["results"]:
        assert {"flashsoftmax", "torch", "torch math", "naive"} == set(result["seconds"])
        assert all(len(seconds) == 5 for seconds in result["seconds"].values())
        ours, best = (median(result["seconds"][name]) for name in ("flashsoftmax", result["best_peer"]))
        assert result["rate"] == pytest.approx(result["work"] / ours / 1e9)
        assert result["ratio_to_best_peer"] == pytest.approx(best / ours)
        assert result["share_of_limit"] == pytest.approx(result["rate"] / max(result["limit_rounds"]))
        assert result["machine"]
    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in stem.with_suffix(".svg").read_text()


def test_wrong_results_are_not_timed(main, monkeypatch, tmp_path):
    monkeypatch.setattr(check, "ours", lambda query, key, value, shape: query * 1.01)
    with pytest.raises(SystemExit, match="wrong: float32 forward"):
        main("--dtype", "float32", "--out", str(tmp_path))
    assert not list(tmp_path.iterdir())
