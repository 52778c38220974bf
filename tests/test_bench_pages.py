"""The list of commands, the small benchmarks, the report, and the links of the documentation."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

pytest.importorskip("matplotlib")  # before what needs it

from bench import COMMANDS, accuracy, recurrence, report, sharding  # noqa: E402
from bench.__main__ import main  # noqa: E402
from bench.support.tiled import steps  # noqa: E402


def test_every_module_at_the_top_is_a_command():
    modules = {path.stem for path in (ROOT / "bench").glob("*.py")}
    assert modules - {"__init__", "__main__"} == set(COMMANDS)


def test_commands_are_listed(capsys):
    main([])
    said = capsys.readouterr().out
    assert all(name in said and text in said for name, text in COMMANDS.items())
    with pytest.raises(SystemExit, match="no command 'speed'"):
        main(["speed"])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_a_command_does(name, capsys):
    with pytest.raises(SystemExit) as exit:
        main([name, "--help"])
    assert exit.value.code == 0
    assert COMMANDS[name] in " ".join(capsys.readouterr().out.split())
    assert import_module(f"bench.{name}").__doc__.startswith(COMMANDS[name])


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


@pytest.mark.parametrize(("command", "page"), [(recurrence, "recurrence"), (sharding, "sequence-parallel")])
def test_pictures_of_a_page(command, page, tmp_path, capsys):
    command.main(["--out", str(tmp_path)])
    shown = set(re.findall(r"pictures/([\w-]+)\.svg", (ROOT / f"docs/{page}.md").read_text()))
    assert shown == {path.stem for path in tmp_path.glob("*.svg")}


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_what_they_name(page):
    """A link names a file and no line. If its text is a name in backquotes, the file defines that name."""
    for text, path in re.findall(r"\[([^]]*)\]\(([^)]+)\)", page.read_text()):
        if path.startswith("https://"):
            continue
        target = page.parent / path
        assert "#" not in path and target.exists(), path
        if name := re.fullmatch(r"`(\w+)`", text):
            defined = rf"\b(struct|class|def) {name[1]}\b|\b{name[1]}\("
            assert re.search(defined, target.read_text()), f"no {text} in {path}"


def test_the_recurrence_links_its_functions():
    links = re.findall(r"\[`(\w+)`\]\(\.\./csrc/softmax\.h\)", (ROOT / "docs/recurrence.md").read_text())
    assert {"State", "shift", "weight", "raise", "merge", "inverse_sum", "lse", "from_lse"} <= set(links)
