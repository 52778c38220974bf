"""The example runs, and so does the code in the documentation."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import ranks

ROOT = Path(__file__).parents[1]

if not dist.is_available():
    pytest.skip("torch has no distributed", allow_module_level=True)


def run_snippets(page: str) -> None:
    """Runs the Python of a page, one block after another."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("page", ["README.md", "docs/sequence-parallel.md"])
def test_snippets_run(page):
    run_snippets(page)


def test_snippets_run_on_two_ranks():
    ranks.run(2, run_snippets, "docs/sequence-parallel.md")


def test_the_example_has_the_loss_of_one_process():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = ROOT / "examples/context_parallel.py"
    result = subprocess.run([*command, script, "--steps", "5"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert re.findall(r"rank (\d): (\d+) of 407 tokens", result.stdout) == [("0", "204"), ("1", "203")]
    rows = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+) +([-\d.e+]+)$", result.stdout, re.MULTILINE)
    split, alone, difference = zip(*([float(x) for x in row] for row in rows), strict=True)
    assert len(rows) == 5
    assert max(map(abs, difference)) < 1e-4
    assert split[-1] < 0.5 * split[0] and alone[-1] < 0.5 * alone[0]
