"""The output and the failures of the demo, the examples and the code in the README."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.progress import Progress
from support.pages import python_blocks

pytestmark = pytest.mark.timeout(600)  # two launches
ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = 64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10
PNG = b"\x89PNG\r\n\x1a\n"


def load_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo = load_demo()


def run_python(
    script: Path, *arguments: str, ranks: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script, under mpirun if `ranks` is given. The deadline is for hangs only."""
    launcher = [] if ranks is None else demo.mpirun_command(ranks)
    return subprocess.run(
        [*launcher, sys.executable, str(script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=270,
    )


@pytest.mark.slow
def test_programs_show_their_help() -> None:
    """Run --help of all examples and benchmarks, except for two without arguments."""
    files = {*ROOT.glob("examples/**/*.py"), *ROOT.glob("benchmarks/*.py")}
    files -= {ROOT / "benchmarks/gpu_present.py", ROOT / "examples/methods/methods.py"}
    if importlib.util.find_spec("torchft") is None:  # tests/integrations needs it
        needs = re.compile(r"^(import|from) torchft", re.MULTILINE)
        files = {file for file in files if not needs.search(file.read_text())}
    programs = [str(file) for file in sorted(files) if '__name__ == "__main__"' in file.read_text()]
    assert len(programs) > 30
    done = run_python(ROOT / "tests/support/show_help.py", *programs)
    assert done.returncode == 0, done.stderr[-2000:]


# ---- the demo ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Run a shortened demo; return its output, and the folder that it filled."""
    out = tmp_path_factory.mktemp("demo")
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--epochs", "10"]
    # demo.py ends its own runs after 150 s each.
    process = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=330
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout, out


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_demo_trains_with_a_seventh_of_the_bytes(
    finished: tuple[str, Path], framework: str
) -> None:
    output, out = finished
    results = json.loads((out / "results.json").read_text())
    exact, few = (r for r in results if r["framework"] == framework)
    assert (exact["bits"], few["bits"]) == (32, 4)
    # With two ranks, each sends half of its values, then the reduced other half, plus headers.
    assert 4 * PARAMETERS <= exact["bytes_per_step"] < 1.05 * 4 * PARAMETERS
    assert 7 < exact["bytes_per_step"] / few["bytes_per_step"] < 32 / 4.125
    for result in (exact, few):
        assert result["identical"]
        assert result["accuracy"] >= 0.95
        assert len(result["losses"]) == 10
        assert result["losses"][-1] < result["losses"][0] / 5
        row = rf"^\s*{framework}\s+{result['bits']}\s+{result['accuracy']:.2%}\s.*identical"
        assert re.search(row, output, re.MULTILINE), output
    assert few["losses"] != exact["losses"], "the second run did not quantize"


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_demo_draws_the_loss_curves(finished: tuple[str, Path]) -> None:
    assert (finished[1] / "loss.png").read_bytes().startswith(PNG)


# ---- failures of the demo ----------------------------------------------------------------------


def good_results() -> list[dict[str, Any]]:
    runs = [(framework, bits) for framework in ("torch", "jax") for bits in (32, 4)]
    return [
        {
            "framework": framework,
            "bits": bits,
            "accuracy": 0.97,
            "bytes_per_step": 1000.0 * bits,
            "identical": True,
        }
        for framework, bits in runs
    ]


def test_good_results_have_no_problems() -> None:
    assert demo.problems(good_results()) == []


@pytest.mark.parametrize(
    ("run", "field", "value", "sentence"),
    [
        (0, "identical", False, "torch, 32 bits: the ranks' weights differ"),
        (3, "identical", False, "jax, 4 bits: the ranks' weights differ"),
        (1, "accuracy", 0.959, "torch: 95.90% at 4 bits is more than one point below 97.00% exact"),
        (1, "accuracy", 0.949, "torch: 94.90% at 4 bits is below 95 %"),
        (3, "bytes_per_step", 32000.0, "jax: 4 bits did not send fewer bytes than exact"),
        (2, "framework", "other", "jax: a result is missing"),
    ],
)
def test_bad_results_are_described(run: int, field: str, value: Any, sentence: str) -> None:
    results = good_results()
    results[run][field] = value
    assert sentence in demo.problems(results)


def test_a_rank_that_raises_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "rank = os.environ['OMPI_COMM_WORLD_RANK']\n"
        "print('here is rank', rank, flush=True)\n"
        "if rank == '1':\n"
        "    raise ValueError('no more digits')\n"
    )
    with Progress(disable=True) as progress, pytest.raises(demo.RunError) as caught:
        demo.run(script, [], progress, 1, timeout=60)
    last_lines = str(caught.value).split("--- rank 1\n")[1]
    assert "here is rank 1" in last_lines
    assert "ValueError: no more digits" in last_lines


def test_a_hanging_run_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "(folder / os.environ['OMPI_COMM_WORLD_RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    with Progress(disable=True) as progress, pytest.raises(demo.RunError, match="more than 5 s"):
        demo.run(script, [], progress, 1, timeout=5)
    processes = [Path(f"/proc/{(tmp_path / rank).read_text()}") for rank in "01"]
    deadline = time.monotonic() + 20
    while any(is_alive(process) for process in processes):
        assert time.monotonic() < deadline, "ranks outlived the demo's deadline"
        time.sleep(0.1)


def is_alive(process: Path) -> bool:
    """Return whether a process of /proc exists and is not a zombie."""
    try:
        return "State:\tZ" not in (process / "status").read_text()
    except OSError:
        return False


# ---- the examples and the README -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_one_rank_needs_no_mpirun(framework: str) -> None:
    script = ROOT / "examples" / f"{framework}_digits.py"
    process = run_python(script, "--epochs", "1", "--bits", "2")
    assert process.returncode == 0, process.stderr
    epoch, result = map(json.loads, process.stdout.splitlines())
    assert (epoch["bits"], epoch["epoch"]) == (2, 1)
    assert result["bytes_per_step"] == 0
    assert result["identical"]


@pytest.mark.slow
def test_fsdp2_trains_in_few_bits() -> None:
    process = run_python(ROOT / "examples" / "fsdp2.py", "--epochs", "10", ranks=2)
    assert process.returncode == 0, process.stdout + process.stderr
    lines = re.findall(r"^\[[^]]*,0\]<stdout>: (.*)$", process.stdout, re.MULTILINE)
    exact, few = (result for result in map(json.loads, lines) if "accuracy" in result)
    assert (exact["bits"], few["bits"], few["weight_bits"]) == (32, 4, 8)
    assert exact["accuracy"] >= 0.95
    assert few["accuracy"] >= exact["accuracy"] - 0.01
    assert few["losses"] != exact["losses"], "the second run did not quantize"
    # With two ranks, each sends half of its weights twice, and half of its gradients.
    assert 3 * 2 * PARAMETERS <= exact["bytes_per_step"] < 1.05 * 3 * 2 * PARAMETERS
    assert 4 < exact["bytes_per_step"] / few["bytes_per_step"] < 3 * 32 / (8 + 8 + 4)
    assert exact["identical"]
    assert few["identical"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "ranks"),
    [
        ("experts", 2),
        pytest.param("experts", 4, marks=pytest.mark.exhaustive),
        ("jax_experts", 4),
    ],
)
def test_experts_train_in_few_bits(example: str, ranks: int) -> None:
    process = run_python(ROOT / "examples" / f"{example}.py", ranks=ranks)
    assert process.returncode == 0, process.stdout + process.stderr
    lines = re.findall(r"^\[[^]]*,0\]<stdout>: ({.*)$", process.stdout, re.MULTILINE)
    exact, *few = (result for result in map(json.loads, lines) if "accuracy" in result)
    assert [result["bits"] for result in (exact, *few)] == [32, 8, 4]
    assert exact["accuracy"] >= 0.95
    for result in few:
        assert result["accuracy"] >= exact["accuracy"] - 0.01
        assert result["losses"] != exact["losses"], "the tokens were not quantized"
        if example == "experts":
            assert result["bytes_per_step"] < exact["bytes_per_step"]
    assert all(result["identical"] for result in (exact, *few))


@pytest.mark.slow
def test_tensor_parallel_trains_in_few_bits() -> None:
    """Compare 2 ranks with one, which has the whole model, and few bits with exact values."""
    arguments = ["--epochs", "10", "--backend", "aot_eager"]  # inductor compiles for minutes
    results = []
    for ranks, bits in ((1, ["32"]), (2, ["32", "4"])):
        example = ROOT / "examples" / "tensor_parallel.py"
        process = run_python(example, *arguments, "--bits", *bits, ranks=ranks)
        assert process.returncode == 0, process.stdout + process.stderr
        found = map(json.loads, lines_of_rank_0(process))
        results += [result for result in found if "accuracy" in result]
    alone, exact, *few = results
    assert [result["bits"] for result in results] == [32, 32, 4]
    assert alone["accuracy"] >= 0.93
    # The models differ in the order of float32 sums only: 2^-24 in each of 37 steps.
    assert exact["losses"][0] == pytest.approx(alone["losses"][0], rel=37 * 2**-24)
    for result in (exact, *few):
        assert result["accuracy"] >= alone["accuracy"] - 0.01
        assert result["identical"]
    for result in few:
        assert result["losses"] != exact["losses"], "the activations were not quantized"
        assert result["bytes_per_step"] < exact["bytes_per_step"] / 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "schedule"),
    [(2, "1f1b"), pytest.param(4, "gpipe", marks=pytest.mark.exhaustive)],
)
def test_pipeline_trains_in_few_bits(ranks: int, schedule: str) -> None:
    options = ("--epochs", "10", "--schedule", schedule)
    process = run_python(ROOT / "examples" / "pipeline.py", *options, ranks=ranks)
    assert process.returncode == 0, process.stdout + process.stderr
    exact, *few = (x for x in map(json.loads, lines_of_rank_0(process)) if "accuracy" in x)
    assert [result["bits"] for result in (exact, *few)] == [32, 8, 4]
    assert exact["accuracy"] >= 0.95
    for result in few:
        assert result["accuracy"] >= exact["accuracy"] - 0.01
        assert result["losses"] != exact["losses"], "the activations were not quantized"
        # Rank 0 sends 4 micro-batches of 16 x 256 activations.
        payload = 64 * 256 * (result["bits"] / 8 + 8 / 512)
        assert payload <= result["bytes_per_step"] < payload + 4000


def check_few_bits(process: subprocess.CompletedProcess[str], lines: list[str]) -> dict[str, Any]:
    """Compare the runs at 32 and at 4 bits; return the result at 4 bits."""
    assert process.returncode == 0, process.stdout + process.stderr
    exact, few = (result for result in map(json.loads, lines) if "accuracy" in result)
    assert (exact["bits"], few["bits"]) == (32, 4)
    assert exact["accuracy"] >= 0.95
    assert few["accuracy"] >= exact["accuracy"] - 0.01
    assert few["losses"] != exact["losses"], "the second run did not quantize"
    assert exact["identical"]
    assert few["identical"]
    return few


@pytest.mark.exhaustive
def test_rewritten_step_trains_in_few_bits() -> None:
    process = run_python(ROOT / "examples" / "compiled.py", "--epochs", "10", ranks=2)
    lines = re.findall(r"^\[[^]]*,0\]<stdout>: (.*)$", process.stdout, re.MULTILINE)
    few = check_few_bits(process, lines)
    assert few["rewritten"] == 3
    assert few["resumed_identical"]


def lines_of_rank_0(process: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the JSON lines of rank 0; gloo prints other lines."""
    return re.findall(r"^\[[^]]*,0\]<stdout>: (\{.*)$", process.stdout, re.MULTILINE)


@pytest.mark.slow
def test_ddp_on_the_backend_trains_in_few_bits() -> None:
    process = run_python(ROOT / "examples" / "ddp_backend.py", "--epochs", "10", ranks=2)
    few = check_few_bits(process, lines_of_rank_0(process))
    # With two ranks, each sends half of its values, then the reduced other half. Biases and the
    # last layer are exact. Other values take 4 bits, and 8 bytes for each 512 values.
    exact = 256 + 256 + 256 * 10 + 10
    payload = 4 * exact + (PARAMETERS - exact) * (1 / 2 + 8 / 512)
    assert payload <= few["bytes_per_step"] < 1.05 * payload


@pytest.mark.exhaustive
def test_ddp_with_the_hook_resumes_to_the_same_bits() -> None:
    process = run_python(ROOT / "examples" / "ddp_hook.py", "--epochs", "10", ranks=2)
    assert check_few_bits(process, lines_of_rank_0(process))["resumed_identical"]


@pytest.mark.exhaustive
def test_torchrun_trains_in_few_bits() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.run(
        [*launcher, "--nproc-per-node", "2", ROOT / "examples" / "torchrun.py", "--epochs", "10"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    check_few_bits(process, [x for x in process.stdout.splitlines() if x.startswith("{")])


@pytest.mark.exhaustive
def test_two_axes_give_the_same_bits_in_one_process_and_in_two() -> None:
    """Compare runs whose axis "data" is between devices, or between processes."""
    script, arguments = ROOT / "examples" / "jax_two_axes.py", ("--epochs", "10")
    alone, mpirun = run_python(script, *arguments), run_python(script, *arguments, ranks=2)
    few = check_few_bits(alone, alone.stdout.splitlines())
    assert few["mesh"] == {"data": 2, "model": 2}
    assert check_few_bits(mpirun, lines_of_rank_0(mpirun)) == few


@pytest.mark.slow
def test_sharded_arrays_in_plain_jit_train_in_few_bits() -> None:
    process = run_python(ROOT / "examples" / "jax_sharded.py", "--epochs", "10", ranks=2)
    assert check_few_bits(process, lines_of_rank_0(process))["mesh"] == {"data": 4}


@pytest.mark.slow
def test_a_process_per_rank_trains_in_few_bits() -> None:
    script = ROOT / "examples" / "jax_process_per_rank.py"
    process = run_python(script, "--epochs", "10", ranks=2)
    few = check_few_bits(process, lines_of_rank_0(process))
    # With two ranks, each sends half of its values, then the reduced other half, plus headers.
    # Leaves of fewer than 16 values are exact.
    payload = (PARAMETERS - 10) * (1 / 2 + 8 / 512) + 4 * 10
    assert payload <= few["bytes_per_step"] < 1.05 * payload


@pytest.mark.exhaustive
def test_optax_with_feedback_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def results(*arguments: str) -> list[dict[str, Any]]:
        script = ROOT / "examples" / "jax_optax.py"
        process = run_python(script, "--epochs", "10", *arguments, ranks=2)
        assert process.returncode == 0, process.stdout + process.stderr
        lines = map(json.loads, lines_of_rank_0(process))
        return [line for line in lines if "accuracy" in line]

    exact, *few = results("--bits", "32", "4", "2")
    assert exact["accuracy"] >= 0.95
    for result, bits in zip(few, (4, 2), strict=True):
        assert (result["bits"], result["epoch"], result["feedback"]) == (bits, 10, True)
        assert result["accuracy"] >= exact["accuracy"] - 0.01
        assert result["identical"]
    assert len({result["digest"] for result in (exact, *few)}) == 3, "some runs did not quantize"
    half = ("--bits", "2", "--folder", str(tmp_path / "run"))
    [stopped], [resumed] = results(*half, "--stop", "5"), results(*half)
    assert (stopped["epoch"], resumed["epoch"]) == (5, 10)
    assert stopped["losses"] + resumed["losses"] == few[1]["losses"]
    assert resumed["digest"] == few[1]["digest"]


@pytest.mark.exhaustive
def test_diloco_on_jax_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def result(*arguments: str) -> dict[str, Any]:
        script = ROOT / "examples" / "diloco_jax.py"
        streaming = ("--fragments", "2", "--fragment-sync-delay", "3", "--sync-every", "10")
        options = ("--fragment-update-alpha", "0.5", "--steps", "40", *streaming)
        process = run_python(script, *options, *arguments, ranks=2)
        assert process.returncode == 0, process.stdout + process.stderr
        return [json.loads(line) for line in lines_of_rank_0(process)][-1]

    whole = result()
    assert whole["identical"]
    assert whole["loss"] < 3.5, "the loss begins at ln(alphabet), above 4.5"
    folder = ("--folder", str(tmp_path / "run"))
    stopped, resumed = result(*folder, "--stop", "14"), result(*folder)  # a fragment in flight
    assert (stopped["step"], resumed["step"]) == (14, 40)
    assert resumed["digest"] == whole["digest"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "methods"),
    [
        pytest.param("images", ["exact", "levels, 2 bits"], marks=pytest.mark.exhaustive),
        pytest.param("characters", ["gloo, PowerSGD", "PowerSGD"], marks=pytest.mark.exhaustive),
        pytest.param(
            "boxes", ["gloo", "gloo, fp16", "4 bits", "topk 1 %"], marks=pytest.mark.exhaustive
        ),
    ],
)
def test_methods_train_side_by_side(task: str, methods: list[str], tmp_path: Path) -> None:
    script, out = ROOT / "examples" / "methods" / f"{task}.py", str(tmp_path)
    process = run_python(script, "--methods", *methods, "--steps", "50", "--out", out, ranks=2)
    assert process.returncode == 0, process.stdout + process.stderr
    curves = json.loads((tmp_path / f"{task}.json").read_text())
    assert [curve["method"] for curve in curves] == methods
    for curve in curves:
        assert curve["identical"]
        assert curve["ours"] == ("gloo" not in curve["method"]) == (curve["bytes_per_step"] > 0)
        assert (len(curve["losses"]), curve["steps"][-1]) == (10, 50)
        assert curve["losses"][-1] < curve["losses"][0], f"{curve['method']} learned nothing"
        assert curve["method"] in process.stdout
    assert len({curve["losses"][-1] for curve in curves}) == len(methods), (
        "methods have the same loss"
    )
    assert (tmp_path / f"{task}.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_every_method_runs(tmp_path: Path) -> None:
    """Run one step of each method on one rank, then check the error for an unknown method."""
    script = ROOT / "examples" / "methods" / "boxes.py"
    process = run_python(
        script, "--methods", "all", "--steps", "4", "--out", str(tmp_path), ranks=1
    )
    assert process.returncode == 0, process.stdout + process.stderr
    names = run_python(ROOT / "examples" / "methods" / "methods.py").stdout.splitlines()
    curves = json.loads((tmp_path / "boxes.json").read_text())
    assert [curve["method"] for curve in curves] == names
    process = run_python(script, "--methods", "3 bits")
    assert process.returncode == 2
    assert "invalid choice: '3 bits'" in process.stderr


WEIGHT_CHECKS = {
    "torch": """
import torch, torch_digits as example
model = torch.nn.Linear(3, 2)
for value in (0.0, 1e-30 * rank):
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.constant_(model.bias, value)
    print(example.same_on_all_ranks(model))
""",
    "jax": """
import jax.numpy as jnp, jax_digits as example
for value in (0.0, 1e-30 * rank):
    print(example.same_on_all_ranks([(jnp.zeros((3, 2)), jnp.full(2, value))]))
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_different_weights_are_detected(framework: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    start = f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r})\n"
    start += "import cgx_ops; rank = cgx_ops.init().rank\n"
    script.write_text(start + WEIGHT_CHECKS[framework])
    process = run_python(script, ranks=2)
    assert process.returncode == 0, process.stdout + process.stderr
    for rank in "01":
        printed = re.findall(rf"^\[[^]]*,{rank}\]<stdout>: (.*)$", process.stdout, re.MULTILINE)
        assert printed == ["True", "False"]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_code_of_the_readme_runs(framework: str, tmp_path: Path) -> None:
    code = readme_code(framework)
    assert 3 < sum(bool(line.strip()) for line in code.splitlines()) < 10
    script = tmp_path / "average.py"
    script.write_text(code)
    process = run_python(script, ranks=2)
    assert process.returncode == 0, process.stdout + process.stderr
    printed: dict[str, list[str]] = {"0": [], "1": []}
    for rank, text in re.findall(r"^\[[^]]*,(\d)\]<stdout>: (.*)$", process.stdout, re.MULTILINE):
        printed[rank].append(text)
    assert printed["0"], "nothing was printed"
    assert printed["0"] == printed["1"], "ranks printed different averages"


def readme_code(framework: str) -> str:
    """Return the first Python block below the heading of a framework."""
    text = (ROOT / "README.md").read_text()
    section = text.split({"torch": "### PyTorch\n", "jax": "### JAX\n"}[framework])[1]
    return python_blocks(section)[0]
