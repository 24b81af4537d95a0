"""Run torch's own tests of a backend (distributed_test.py of the installed torch) on "cgx".

    python -m support.torch_suite [--world-size 3] [-k pattern] [--backend NAME|both] [--json out]

With "both" (the default) the same tests run on gloo too, and tests with different outcomes are
listed; the exit status shows whether one of them has no reason in EXPLAINED. The suite has a
list of backends; "cgx" compares equal to gloo here, so that no test is skipped because of the
name. Its tests of groups run on 3 or more ranks. Ranks are forked, not spawned, which saves
seconds per rank and test. Requires the package expecttest.

Phases: load the suite with the backend's name; run the tests, each on its ranks; compare.
"""

import argparse
import fnmatch
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import types
import unittest
from pathlib import Path
from typing import Any

from support.launch import python_path

# Tests that cannot pass on any backend outside of torch, and why.
EXPLAINED = {
    "test_ddp_logging_data_cpu": "DDP's log calls every backend from outside torch 'custom'",
}

SUITE = "torch.testing._internal.distributed.distributed_test"
_NAME_LINE = 'BACKEND = os.environ["BACKEND"]'

Outcome = dict[str, Any]  # "outcome": pass, fail or skip; "detail"; "seconds"


class LikeGloo(str):
    """The name of a backend that is also equal to "gloo" in comparisons and look-ups."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def load(backend: str, world_size: int) -> Any:
    """Import the suite for one backend; return its test class."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(world_size), INIT_METHOD="file://")
    from torch.testing._internal import common_distributed

    if world_size > 2:  # the suite requires 8 ranks for its groups of ranks 1 and 2
        common_distributed.skip_if_small_worldsize = lambda test: test
    spec = importlib.util.find_spec(SUITE)
    assert spec is not None and spec.origin is not None, f"this torch has no {SUITE}"
    source = Path(spec.origin).read_text()
    assert source.count(_NAME_LINE) == 1, f"{SUITE} gets the backend's name in a new way"
    module = types.ModuleType(SUITE)
    module.__file__ = spec.origin
    sys.modules[SUITE] = module
    if backend == "cgx":
        import cgx_ops.torch  # noqa: F401  (registers the backend)

        common_distributed.DistTestCases.backend_feature["plugin"].add(backend)
        module.__dict__["_like_gloo"] = LikeGloo
        source = source.replace(_NAME_LINE, f"BACKEND = _like_gloo({backend!r})")
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    for profiled in (
        "PROFILING_SUPPORTED_BACKENDS",
        "CUDA_PROFILING_SUPPORTED_BACKENDS",
        "SEND_RECV_PROFILING_SUPPORTED_BACKENDS",
    ):
        module.__dict__[profiled].append(backend)

    class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore
        def setUp(self) -> None:
            super().setUp()
            module.__dict__["INIT_METHOD"] = os.environ["INIT_METHOD"]  # a file, created again
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Tests


def run(backend: str, world_size: int, patterns: list[str]) -> dict[str, Outcome]:
    """Run the suite's tests that match a pattern, in this process and its forks."""
    tests = load(backend, world_size)
    outcomes: dict[str, Outcome] = {}
    for name in unittest.TestLoader().getTestCaseNames(tests):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            continue
        begun, result = time.monotonic(), unittest.TestResult()
        tests(name).run(result)
        problems = [*result.failures, *result.errors]
        outcome = "fail" if problems else "skip" if result.skipped else "pass"
        detail = "".join(text for _, text in (*problems, *result.skipped))
        seconds = round(time.monotonic() - begun, 2)
        outcomes[name] = {"outcome": outcome, "detail": detail, "seconds": seconds}
        print(f"{outcome} {name} {seconds} s", file=sys.stderr, flush=True)
    return outcomes


def run_apart(
    backend: str, world_size: int, patterns: list[str], deadline: float | None = None
) -> dict[str, Outcome]:
    """Call run() in a separate process, because the suite reads the backend's name at import."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--inner", "--backend", backend]
        command += ["--world-size", str(world_size), "--json", file.name]
        for pattern in patterns:
            command += ["-k", pattern]
        environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
        environment.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "120")
        subprocess.run(command, check=True, env=environment, timeout=deadline)
        return json.loads(Path(file.name).read_text())


def differences(ours: dict[str, Outcome], theirs: dict[str, Outcome]) -> list[str]:
    """Return a line for every test with different outcomes, with its reason."""
    lines = []
    for name in sorted({*ours, *theirs}):
        mine, other = ours.get(name), theirs.get(name)
        outcomes = [each["outcome"] if each else "absent" for each in (mine, other)]
        if outcomes[0] != outcomes[1]:
            detail = mine["detail"].splitlines() if mine else []
            last = next((line for line in reversed(detail) if "Error" in line), "")
            why = f"EXPLAINED: {EXPLAINED[name]}" if name in EXPLAINED else last[:300]
            lines.append(f"{name}: cgx {outcomes[0]}, gloo {outcomes[1]}; {why}")
    return lines


def summary(outcomes: dict[str, Outcome]) -> str:
    """Return the numbers of passed, failed and skipped tests."""
    kinds = [outcome["outcome"] for outcome in outcomes.values()]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("pass", "fail", "skip"))


def main() -> int:
    parser = argparse.ArgumentParser(description="torch's own tests of a backend, on cgx")
    parser.add_argument("--backend", choices=("cgx", "gloo", "both"), default="both")
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument(
        "-k", dest="patterns", action="append", help="pattern of test names, with wildcards"
    )
    parser.add_argument("--json", type=Path, help="receives every outcome")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    patterns = arguments.patterns or ["*"]
    if arguments.inner:
        outcomes = run(arguments.backend, arguments.world_size, patterns)
        arguments.json.write_text(json.dumps(outcomes))
        return 0
    backends = ["cgx", "gloo"] if arguments.backend == "both" else [arguments.backend]
    results = {each: run_apart(each, arguments.world_size, patterns) for each in backends}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    for backend, outcomes in results.items():
        print(f"{backend}, {arguments.world_size} ranks: {summary(outcomes)}")
    if len(backends) == 1:
        return 0
    lines = differences(results["cgx"], results["gloo"])
    print(f"{len(lines)} differences" + "".join(f"\n  {line}" for line in lines))
    return 1 if any("; EXPLAINED: " not in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
