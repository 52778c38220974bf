"""Checks a machine with a GPU, in one command: python bench/gpu_check.py --wheel dist/*.whl.

Installs the wheel into a temporary folder, then runs the tests marked cuda, the throughput of prefill, backward and
decode, and some of the tests under compute-sanitizer if it is there. Writes gpu-check.json and gpu-check.md. Needs this
checkout and the Python packages that the tests import, but no network and no compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SUITES = ("gpu-prefill", "gpu-backward", "gpu-decode")
SANITIZED = "all-features or heads-6-2 or decode-lengths or window-8-0"
"""The cases for compute-sanitizer, which makes a test about a hundred times slower."""


def run(command: Sequence[str], timeout: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs a step. Returns its command, exit status, seconds and the end of its output.

    The exit status is None if the step ran out of time or its program was not found.
    """
    print("$", shlex.join(command), flush=True)
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=timeout,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as expired:
        status, output = None, (expired.stdout or b"").decode(errors="replace")
    except FileNotFoundError as error:
        status, output = None, str(error)
    print(output[-6000:], flush=True)
    return {
        "command": shlex.join(command),
        "status": status,
        "seconds": round(time.monotonic() - begin, 1),
        "output": output[-20000:],
    }


def machine(environment: Mapping[str, str]) -> dict[str, Any]:
    code = (
        "import torch, json, flashsoftmax; p = torch.cuda.get_device_properties(0); "
        "print(json.dumps({'gpu': p.name, 'capability': f'{p.major}.{p.minor}', 'processors': p.multi_processor_count, "
        "'memory_gib': round(p.total_memory / 2**30, 1), 'torch': torch.__version__, "
        "'flashsoftmax': str(flashsoftmax.build_info())}))"
    )
    step = run([sys.executable, "-c", code], 120, environment)
    if step["status"] != 0:
        raise SystemExit("flashsoftmax does not import, or torch sees no GPU; the output above says which")
    found: dict[str, Any] = json.loads(step["output"].splitlines()[-1])
    return found


def verdict(step: Mapping[str, Any]) -> str:
    if step["status"] is None:
        return "did not finish"
    last = [
        line for line in step["output"].splitlines() if re.search(r"passed|failed|error|ERROR SUMMARY|correct in", line)
    ]
    return f"{'passed' if step['status'] == 0 else 'failed'}: {last[-1].strip(' =') if last else 'no output'}"


def rows(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| dtype | shape | rate | of the limit | best peer | ratio to it |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for result in results:
        shape = result["shape"]
        heads = f"{shape['heads']}/{shape['heads_kv']}"
        kind = f"{shape['kind']}{' causal' if shape['causal'] else ''}"
        yield (
            f"| {result['dtype']} | {kind}, B {shape['batch']}, H {heads}, "
            f"{shape['queries']} x {shape['keys']}, D {shape['dim']} | {result['rate']:.3g} {result['unit']} "
            f"| {result['share_of_limit']:.0%} | {result['best_peer']} | {result['ratio_to_best_peer']:.2f} |"
        )


def report(record: Mapping[str, Any]) -> str:
    found = record["machine"]
    lines = [
        f"# {found['gpu']}",
        "",
        f"{found['processors']} multiprocessors, {found['memory_gib']} GiB, torch {found['torch']}, {record['date']}.",
        f"`{record['command']}`",
        "",
        *(f"- {name}: {verdict(step)} ({step['seconds']} s)" for name, step in record["steps"].items()),
        "",
        *(rows(record["results"]) if record["results"] else ["No throughput was measured."]),
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python bench/gpu_check.py", description=__doc__)
    parser.add_argument("--wheel", type=Path, required=True, help="the wheel of flashsoftmax, built with CUDA")
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu"), help="folder of the two files; default: %(default)s"
    )
    parser.add_argument("--dtype", default="bfloat16", help="for the throughput; default: %(default)s")
    parser.add_argument("--tests", type=float, default=150, help="seconds for the tests; default: %(default)g")
    parser.add_argument(
        "--throughput", type=float, default=120, help="seconds for the throughput; default: %(default)g"
    )
    options = parser.parse_args(argv)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as site:
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site]
        subprocess.run([*install, str(options.wheel.resolve())], check=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), site])}
        record: dict[str, Any] = {
            "command": shlex.join(["python", "bench/gpu_check.py", *argv]),
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "machine": machine(environment),
            "steps": {},
            "results": [],
        }

        def finish() -> None:
            (out / "gpu-check.json").write_text(json.dumps(record, indent=1) + "\n")
            (out / "gpu-check.md").write_text(report(record))

        python = [sys.executable, "-m"]
        pytest = [*python, "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "--tb=short", "tests"]
        suites = ["--suite", ",".join(SUITES)]
        steps = {
            "tests": (pytest, options.tests),
            "throughput": (
                [*python, "bench.throughput", "--device", "cuda", "--dtype", options.dtype, "--out", str(out), *suites],
                options.throughput,
            ),
        }
        if sanitizer := shutil.which("compute-sanitizer"):
            steps["memory check"] = ([sanitizer, "--error-exitcode", "9", *pytest, "-k", SANITIZED], 60)
        for name, (command, seconds) in steps.items():
            record["steps"][name] = run(command, seconds, environment)
            for suite in SUITES if name == "throughput" else ():
                found = out / f"throughput-cuda-{suite}.json"
                record["results"] += json.loads(found.read_text())["results"] if found.exists() else []
            finish()
    print((out / "gpu-check.md").read_text())
    return int(any(step["status"] != 0 for step in record["steps"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
