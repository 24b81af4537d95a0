"""The logger cgx_ops: one line when training starts and one at the end, on rank 0, on stderr."""

import re
import subprocess
import sys

import pytest
from support import launch

from cgx_ops import Config
from cgx_ops._core import log

SENT = r"cgx: sent \d+\.\d kB instead of \d+\.\d [kM]B"
STARTS = {
    "hook": "cgx: DDP in 4 bits, 2 ranks, shared memory; 4 tensors, 2 of them exact",
    "carried hook": "cgx: DDP in 4 bits, 2 ranks, torch's collectives; 4 tensors, 2 of them exact",
    "automatic": "cgx: DDP in 4 bits, 2 ranks, shared memory; 4 tensors, 2 of them exact",
    "fsdp": "cgx: FSDP2 in 4 bits, 2 ranks, shared memory; 4 tensors, 2 of them exact",
    "operators": "cgx: operators in 4 bits, 2 ranks, shared memory",
    "carried operators": "cgx: operators in 4 bits, 2 ranks, torch's collectives",
    "power_sgd": "cgx: DDP by PowerSGD of rank 1, the rest in exact values, 2 ranks, shared "
    "memory; 4 tensors",
}


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if "cgx:" in line]


MARKS = {"fsdp": [], "hook": [pytest.mark.slow]}  # of others: exhaustive


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=MARKS.get(how, [pytest.mark.exhaustive])) for how in STARTS],
)
def test_torch(how: str) -> None:
    env = {"CGX_COMPRESSION_QUANTIZATION_BITS": "4", "CGX_LOG": "1"}
    first, other = map(lines_of, launch.mpirun(2, "run_log.py", how, env=env))
    assert other == []
    assert first[0] == STARTS[how]
    assert re.fullmatch(SENT, first[1]), first
    assert len(first) == 2


@pytest.mark.parametrize(
    ("carrier", "how"), [("native", "shared memory"), ("xla", "XLA's collectives")]
)
def test_jax(carrier: str, how: str) -> None:
    first, other = map(lines_of, launch.mpirun(2, "run_log_jax.py", carrier, env={"CGX_LOG": "1"}))
    assert other == []
    assert first[0] == f"cgx: JAX in 4 bits, 2 ranks, {how}; 2 tensors, 1 of them exact"
    assert re.fullmatch(SENT, first[1]), first
    assert len(first) == 2


@pytest.mark.slow
def test_fsdp_without_compression() -> None:
    outputs = launch.mpirun(2, "run_log.py", "exact fsdp", env={"CGX_LOG": "1"})
    expected = "cgx: reduce_scatter in exact values, 2 ranks, torch's collectives"
    first, other = map(lines_of, outputs)
    assert first[0] == expected
    assert other == []


@pytest.mark.slow
def test_silence() -> None:
    outputs = launch.mpirun(2, "run_log.py", "hook", env={"CGX_LOG": "0"})
    assert [lines_of(text) for text in outputs] == [[], []]


@pytest.mark.slow
def test_decisions_are_logged_once_for_each_tensor() -> None:
    first = launch.mpirun(2, "run_log.py", "decisions", env={"CGX_LOG": "1"})[0].splitlines()
    decided = [line for line in first if line.startswith("cgx_ops.torch.backend: DDP, ")]
    assert [line.partition("DDP, ")[2] for line in decided] == [
        "'0.weight', 65536 elements: 4 bits",
        "'0.bias', 256 elements: exact, its bits are 32",
        "'2.weight', 2560 elements: 4 bits",
        "'2.bias', 10 elements: exact, its bits are 32",
    ]
    # the root logger's handler receives them
    assert not any(line.startswith("cgx:") for line in first)


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        ("", "", 1),  # cgx_ops has its own handler
        ("logging.basicConfig(level='INFO');", "", 1),  # the root logger's
        ("", "logging.basicConfig(level='INFO');", 1),  # the same, configured later
        ("logging.basicConfig(level='WARNING');", "", 0),
        ("logging.getLogger('cgx_ops').addHandler(logging.NullHandler());", "", 0),
    ],
)
def test_handlers(before: str, after: str, count: int) -> None:
    program = (
        f"import logging; {before} import cgx_ops; from cgx_ops._core import log; cgx_ops.init(); "
        f"{after}"
        "[log.started(1, 'X', cgx_ops.Config(bits=4), 2, 'shm', None) for _ in range(2)]"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr.count("cgx: X in 4 bits, 2 ranks, shared memory") == count, ended.stderr
    assert ended.stdout == ""


def test_invalid_value() -> None:
    command = [sys.executable, "-c", "import cgx_ops; cgx_ops.init()"]
    env = {"CGX_LOG": "yes", "PATH": "", "PYTHONPATH": launch.python_path()}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert "CGX_LOG is 'yes'; accepted: 0 (silent), 1, or unset" in ended.stderr


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(bits=32), "exact values"),
        (Config(bits=4), "4 bits"),
        (Config(bits=1), "1 bit"),
        (Config(compressor="levels", bits=2), "levels, 2 bits"),
        (Config(compressor="topk", density=0.01), "topk, density 0.01"),
        (Config(compressor="topk"), "topk"),
        (Config(compressor="entropy", rate=0.5), "entropy, rate 0.5"),
        (Config(compressor="lossless"), "lossless"),
        (Config(compressor="mxfp8"), "mxfp8"),
        (Config(compressor="half"), "half"),
    ],
)
def test_configs_in_words(config: Config, words: str) -> None:
    assert log.described(config) == words
