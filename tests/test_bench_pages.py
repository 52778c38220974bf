"""The front door, the small benchmarks, the report, and the page about the recurrence."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

pytest.importorskip("matplotlib")  # before what needs it

from bench import BENCHMARKS, accuracy, recurrence, report  # noqa: E402
from bench.__main__ import main  # noqa: E402
from bench.tiled import steps  # noqa: E402


def test_front_door_lists_all(capsys):
    main([])
    said = capsys.readouterr().out
    assert all(name in said for name in BENCHMARKS)
    with pytest.raises(SystemExit, match="no benchmark 'speed'"):
        main(["speed"])


def test_tiles_are_attention_and_the_mistakes_are_not():
    torch.manual_seed(0)
    scores, values = 3 * torch.randn(5, 64), torch.randn(64, 4)
    exact = scores.softmax(1) @ values
    *_, last = steps(scores, values, 16)
    torch.testing.assert_close(last.output, exact)
    *_, zero = steps(scores - 200, values, 16, first_m=0.0)
    assert zero.output.isnan().all()
    *_, zero = steps(scores, values, 16, first_m=0.0)
    torch.testing.assert_close(zero.output, exact)
    rising = scores.sort(1).values
    *_, behind = steps(rising, values, 16, rescale_acc=False)
    assert (behind.output - rising.softmax(1) @ values).abs().max() > 0.1
    *_, first = steps(rising.flip(1), values, 16, rescale_acc=False)
    torch.testing.assert_close(first.output, rising.flip(1).softmax(1) @ values)


@pytest.fixture
def small(monkeypatch):
    """Sweeps of two values and few keys."""
    monkeypatch.setattr(accuracy, "KEYS", 256)
    for name in ("INPUTS", "MERGES"):
        short = [accuracy.Sweep(s.name, s.axis, s.quick[::2], s.quick[:2]) for s in getattr(accuracy, name)]
        for sweep in short:
            found = {"keys": "KEYS_SWEEP", "splits": "SPLITS", "order": "ORDER"}
            constant = found.get(sweep.name, sweep.name.upper())
            monkeypatch.setattr(accuracy, constant, sweep)
        monkeypatch.setattr(accuracy, name, tuple(short))


def test_accuracy_shows_what_breaks(small, tmp_path, capsys):
    main_of = accuracy.main
    main_of(["--device", "cpu", "--dtype", "float32", "--quick", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "accuracy-cpu.json").read_text())["results"]

    def errors(sweep, contender):
        return {r["x"]: r["largest"] for r in results if (r["sweep"], r["contender"]) == (sweep, contender)}

    assert all(error < 1e-4 for error in errors("position", "flashsoftmax").values())
    assert errors("level", "m from 0")[-150] is None
    assert errors("level", "flashsoftmax")[-150] < 1e-4
    position = errors("position", "acc not rescaled")
    assert position[0] < 1e-4 and max(position.values()) > 0.1
    for name in ("accuracy-cpu", "accuracy-cpu-merge"):
        assert (tmp_path / f"{name}.svg").exists() and (tmp_path / f"{name}.png").exists()
    page = report.report(tmp_path)
    assert "## Accuracy, measured: cpu" in page and f"{tmp_path.name}/accuracy-cpu-merge.svg" in page


def test_pictures_of_the_recurrence(tmp_path, capsys):
    recurrence.main(["--out", str(tmp_path)])
    page = (ROOT / "docs/recurrence.md").read_text()
    shown = set(re.findall(r"pictures/(recurrence-\w+)\.svg", page))
    assert shown == {path.stem for path in tmp_path.glob("*.svg")}


def test_page_links_the_lines_that_it_names():
    links = re.findall(r"\[`([^`]+)`\]\((\.\./[^)#]+)#L(\d+)\)", (ROOT / "docs/recurrence.md").read_text())
    assert len(links) >= 9
    for text, path, number in links:
        line = (ROOT / "docs" / path).read_text().splitlines()[int(number) - 1]
        assert text in line, f"{path}:{number} is {line!r}"
