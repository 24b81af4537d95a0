"""DiLoCo with flax and optax: hosts train alone and average every 30 steps, in 4 or 2 bits.

    mpirun -np 4 python examples/diloco_jax.py                              # 4 bits
    mpirun -np 4 python examples/diloco_jax.py --bits 2 --compressor levels
    mpirun -np 4 python examples/diloco_jax.py --fragments 2 --fragment-sync-delay 10 \
        --fragment-update-alpha 0.5                                         # Streaming DiLoCo
    mpirun -np 4 python examples/diloco_jax.py --sparse                     # SparseLoCo
    mpirun -np 4 python examples/diloco_jax.py --local                      # local SGD's average
    mpirun -np 4 python examples/diloco_jax.py --sync-every 1 --local --bits 32

A transformer learns the next character of Python's help texts. Each process stands for a host with
one CPU device, a model, an AdamW and a part of the texts. docs/guides/launchers.md shows how to
start it on several hosts. A run that is stopped resumes from --folder with the same bits. Rank 0
prints a line of JSON after every tenth of the steps, with the loss of the outer parameters, and one
at the end.
"""

import argparse
import pydoc_data.topics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax import NamedSharding, P
from jax.sharding import AxisType
from jax_shared import digest, same_everywhere, say, use_cpu_devices

import cgx_ops
import cgx_ops.jax

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 32, 128, 4, 2, 16

# ---- 1. the model and its texts ------------------------------------------------------------------


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    """A language model: logits of the next character, from the characters before it."""

    def __init__(self, symbols: int, rngs: nnx.Rngs) -> None:
        self.symbols = nnx.Embed(symbols, WIDTH, rngs=rngs)
        self.places = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.scores = nnx.Linear(WIDTH, symbols, rngs=rngs)

    def __call__(self, texts: jax.Array) -> jax.Array:
        x = self.symbols(texts) + self.places(jnp.arange(CONTEXT))
        mask = nnx.make_causal_mask(texts)
        for layer in self.layers:
            x = layer(x, mask)
        return self.scores(self.norm(x))


class Texts:
    """Windows of CONTEXT + 1 characters; nine tenths to train, the rest held back."""

    def __init__(self) -> None:
        text = "\n".join(pydoc_data.topics.topics.values())
        codes = np.unique([*text], return_inverse=True)[1].astype(np.int32)
        self.symbols = int(codes.max()) + 1
        self._train, held = np.split(codes, [len(codes) * 9 // 10])
        self.held = self._windows(held, 200, np.random.default_rng(0))

    def batch(self, count: int, seed: list[int]) -> Any:
        return self._windows(self._train, count, np.random.default_rng(seed))

    def _windows(self, source: Any, count: int, generator: np.random.Generator) -> Any:
        begins = generator.integers(len(source) - CONTEXT, size=(count, 1))
        return source[begins + np.arange(CONTEXT + 1)]


# ---- 2. training ---------------------------------------------------------------------------------


class Training:
    """All hosts' models, the states of their optimizers and of the outer loop."""

    def __init__(self, steps: int, seed: int, sparse: bool, **options: Any) -> None:
        self.mesh = jax.make_mesh((jax.device_count(),), ("hosts",), (AxisType.Auto,))
        self.rows, self.seed, self.texts = NamedSharding(self.mesh, P("hosts")), seed, Texts()
        graph, weights = nnx.split(Transformer(self.texts.symbols, nnx.Rngs(seed)))
        weights = jax.device_get(nnx.to_pure_dict(weights))  # the same in every process
        rate = optax.warmup_cosine_decay_schedule(0, 3e-3, max(1, steps // 20), steps)
        adamw = optax.adamw(rate, weight_decay=0.01)

        outer_loop = cgx_ops.jax.sparse_loco if sparse else cgx_ops.jax.diloco
        self.loop = outer_loop("hosts", mesh=self.mesh, **options)
        self.params, self.outer = self.loop.replicate(weights), self.loop.init(weights)
        self.moments = self.loop.replicate(jax.device_get(adamw.init(weights)))

        def loss_of(weights: Any, windows: jax.Array) -> tuple[jax.Array, jax.Array]:
            model = nnx.merge(graph, weights)
            scores, wanted = model(windows[:, :-1]), windows[:, 1:]
            loss = optax.softmax_cross_entropy_with_integer_labels(scores, wanted).mean()
            return loss, (scores.argmax(2) == wanted).mean()

        # One host's inner step: a vmap over the single copy of this process.
        def inner(weights: Any, moments: Any, windows: jax.Array) -> Any:
            gradients = jax.grad(loss_of, has_aux=True)(weights, windows)[0]
            updates, moments = adamw.update(gradients, moments, weights)
            return optax.apply_updates(weights, updates), moments

        mapped = jax.shard_map(
            jax.vmap(inner), mesh=self.mesh, in_specs=P("hosts"), out_specs=P("hosts")
        )
        self.inner = jax.jit(mapped, donate_argnums=(0, 1))
        self.loss_of = jax.jit(loss_of)

    @property
    def step(self) -> int:
        return int(self.outer.step)

    def run(self, steps: int) -> float:
        """Make steps; return the seconds that they took."""
        begin = time.perf_counter()
        for _ in range(steps):
            seed = [self.seed, jax.process_index(), self.step]
            mine = self.texts.batch(max(1, BATCH // jax.process_count()), seed)
            windows = jax.make_array_from_process_local_data(self.rows, mine[None])
            self.params, self.moments = self.inner(self.params, self.moments, windows)
            self.params, self.outer = self.loop.outer(self.params, self.outer)
        jax.block_until_ready(self.params)
        return time.perf_counter() - begin

    def held(self) -> tuple[float, float]:
        """Return loss and score, percent, of the outer parameters on held-out texts."""
        weights = jax.tree.map(lambda x: x.addressable_data(0), self.outer.outer_parameters)
        loss, right = self.loss_of(weights, self.texts.held)
        return float(loss), 100 * float(right)

    def save(self, folder: Path) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / str(self.step), (self.params, self.moments, self.outer))

    def restore(self, folder: Path) -> None:
        """Go on from the last step saved there, on as many hosts."""
        steps = [int(path.name) for path in folder.glob("*") if path.name.isdigit()]
        if steps:
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                (self.params, self.moments, self.outer),
            )
            with ocp.StandardCheckpointer() as checkpointer:
                restored = checkpointer.restore(folder / str(max(steps)), like)
            self.params, self.moments, self.outer = restored


def bytes_sent() -> int:
    return sum(of.bytes_sent for of in cgx_ops.stats().values())


def main() -> None:
    parser = argparse.ArgumentParser(description="A language model, trained by DiLoCo.")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sync-every", type=int, default=30)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--fragment-sync-delay", type=int, default=0)
    parser.add_argument("--fragment-update-alpha", type=float, default=0.0)
    parser.add_argument("--bits", type=int, help="default 4")
    parser.add_argument("--compressor", help="default uniform")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--sparse", action="store_true", help="SparseLoCo's settings")
    way.add_argument("--local", action="store_true", help="no outer optimizer: plain averages")
    parser.add_argument("--folder", type=Path, help="where to save at the end, and to go on from")
    parser.add_argument("--stop", type=int, help="the step to stop after")
    given = vars(parser.parse_args())
    folder, steps = given.pop("folder"), given.pop("steps")
    stop, seed = given.pop("stop") or steps, given.pop("seed")
    sparse, local = given.pop("sparse"), given.pop("local")
    bits, compressor = given.pop("bits"), given.pop("compressor")
    if sparse and (bits or compressor):
        parser.error("--sparse sets bits and compressor: leave --bits and --compressor out")
    if not sparse:
        given |= {"bits": bits or 4, "compressor": compressor or "uniform"}
    options = {"rules": cgx_ops.Rules([("bias|norm", 32)]), **given}
    if local:
        options["outer_optimizer"] = optax.sgd(1.0)
    use_cpu_devices(1)
    cgx_ops.jax.initialize()
    training = Training(steps, seed, sparse, **options)
    if folder:
        training.restore(folder.resolve())  # orbax takes no relative path
    seconds, begin, sent = 0.0, training.step, bytes_sent()
    while training.step < stop:
        turn = max(1, steps // 10)
        seconds += training.run(min(turn - training.step % turn, stop - training.step))
        say(step=training.step, loss=training.held()[0], seconds=seconds)
    per_step = (bytes_sent() - sent) / max(1, training.step - begin)
    if folder:
        training.save(folder.resolve())
    loss, score = training.held()
    say(
        **given, step=training.step, loss=loss, score=score, seconds=seconds,
        bytes_per_step=per_step, identical=same_everywhere(training.outer.outer_parameters),
        digest=digest(training.outer.outer_parameters),
    )  # fmt: skip


if __name__ == "__main__":
    main()
