"""Flax and optax: gradients in few bits with error feedback; stopped, saved and resumed.

    mpirun -np 2 python examples/jax_optax.py                         # 32 bits, 4, 2
    mpirun -np 2 python examples/jax_optax.py --bits 2 --no-feedback
    mpirun -np 2 python examples/jax_optax.py --bits 1 --compressor levels
    mpirun -np 2 python examples/jax_optax.py --bits 4 --compressor topk    # 1 % of the values
    mpirun -np 2 python examples/jax_optax.py --bits 2 --folder examples/out/run --stop 10
    mpirun -np 2 python examples/jax_optax.py --bits 2 --folder examples/out/run     # goes on

Two CPU devices a process, one mesh over them all. `average_gradients` stands before the optimizer;
what compression lost is part of the optimizer's state, different on each device, and is saved with
it by orbax. A resumed run ends with the same bits as one that never stopped. Rank 0 prints a line
of JSON per epoch and per result.
"""

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax import NamedSharding, P, lax
from jax.sharding import AxisType
from jax_digits import digits
from jax_shared import (
    HIDDEN,
    LEARNING_RATE,
    MOMENTUM,
    batches,
    digest,
    same_everywhere,
    say,
    steps_of_epoch,
    use_cpu_devices,
)

import cgx_ops.jax
from cgx_ops import Config


class Perceptron(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        sizes = pairwise((64, HIDDEN, HIDDEN, 10))
        self.layers = nnx.List([nnx.Linear(n, m, rngs=rngs) for n, m in sizes])

    def __call__(self, images: jax.Array) -> jax.Array:
        *hidden, last = self.layers
        for layer in hidden:
            images = jax.nn.relu(layer(images))
        return last(images)


class Training:
    """A model, its optimizer and their state, on a mesh of all devices."""

    def __init__(self, epochs: int, config: Config) -> None:
        self.mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
        self.epoch = 0
        self.graph, like = nnx.split(nnx.eval_shape(lambda: Perceptron(nnx.Rngs(0))))
        steps = epochs * steps_of_epoch(self.mesh)
        self.optimizer = optax.chain(
            cgx_ops.jax.average_gradients("data", config=config, mesh=self.mesh),
            optax.sgd(optax.cosine_decay_schedule(LEARNING_RATE, steps), MOMENTUM),
        )
        specs = (P(), cgx_ops.jax.state_specs(self.optimizer, like, "data"))
        # Every process makes the same values, and each device its part of them.
        self.weights, self.state = jax.jit(
            self.initial,
            out_shardings=jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs),
        )()
        self.step = jax.jit(
            jax.shard_map(
                self.on_device, mesh=self.mesh, in_specs=(*specs, P("data"), P("data")),
                out_specs=(*specs, P()),
            ),
            donate_argnums=(0, 1),
        )  # fmt: skip

    def initial(self) -> Any:
        weights = nnx.split(Perceptron(nnx.Rngs(0)))[1]
        return weights, self.optimizer.init(weights)

    def on_device(self, weights: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss_of(weights: Any) -> jax.Array:
            scores = nnx.merge(self.graph, weights)(images)
            return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

        # Each device differentiates its own copy; else JAX would sum the gradients itself.
        copies = lax.pcast(weights, "data", to="varying")
        loss, gradients = jax.value_and_grad(loss_of)(copies)
        updates, state = self.optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, lax.pmean(loss, "data")

    def run_epoch(self) -> float:
        losses = []
        for images, labels in batches(self.mesh, self.epoch):
            self.weights, self.state, loss = self.step(self.weights, self.state, images, labels)
            losses.append(float(loss))
        self.epoch += 1
        return float(np.mean(losses))

    def accuracy(self) -> float:
        _, images, _, labels = digits()
        weights = jax.tree.map(lambda w: w.addressable_data(0), self.weights)
        scores = nnx.merge(self.graph, weights)(jnp.asarray(images))
        return float((scores.argmax(1) == labels).mean())

    def save(self, folder: Path) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / str(self.epoch), (self.weights, self.state))

    def restore(self, folder: Path) -> None:
        """Go on from the last epoch saved there; each device gets what it had."""
        epochs = [int(path.name) for path in folder.glob("*") if path.name.isdigit()]
        if epochs:
            self.epoch = max(epochs)
            with ocp.StandardCheckpointer() as checkpointer:
                self.weights, self.state = checkpointer.restore(
                    folder / str(self.epoch), jax.tree.map(abstract, (self.weights, self.state))
                )


def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def train(
    bits: int, compressor: Any, feedback: bool, epochs: int, stop: int, folder: Path | None
) -> None:
    # None: error feedback where the compressor can have it and gains by it.
    error_feedback = None if feedback else False
    config = Config(bits=bits, compressor=compressor, error_feedback=error_feedback)
    training = Training(epochs, config)
    if folder:
        training.restore(folder)
    losses = []
    while training.epoch < stop:
        losses.append(training.run_epoch())
        say(bits=bits, epoch=training.epoch, loss=losses[-1])
    if folder:
        training.save(folder)
    say(
        bits=bits, feedback=feedback, epoch=training.epoch, accuracy=training.accuracy(),
        losses=losses, identical=same_everywhere(training.weights),
        digest=digest(training.weights),
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits with flax, optax and error feedback.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 4, 2])
    parser.add_argument(
        "--compressor",
        default="uniform",
        help="no vote, none that needs a key; --bits if it has none of 2 and 4",
    )
    parser.add_argument("--no-feedback", dest="feedback", action="store_false")
    parser.add_argument("--folder", type=Path, help="where to save at the end, and to go on from")
    parser.add_argument("--stop", type=int, help="the epoch to stop after")
    arguments = parser.parse_args()
    use_cpu_devices(2)
    cgx_ops.jax.initialize()
    stop = arguments.stop or arguments.epochs
    folder = arguments.folder and arguments.folder.resolve()  # orbax takes no relative path
    for bits in arguments.bits:
        train(bits, arguments.compressor, arguments.feedback, arguments.epochs, stop, folder)
