"""Rank program: every compressor in torch.ops.cgx against the numpy allreduce, bit for bit.

        mpirun -np 3 python run_torch_codecs.py CHECK...     # all compressors, both carriers

Torch's generators have different seeds on the ranks, as for data loaders.
"""

from typing import Any

import checks
import torch
import torch.distributed as dist
from support import torch_cases as tc
from support.torch_codecs import CONFIGS, FEEDBACK

import cgx_ops
from cgx_ops import Config

RANK, SIZE = cgx_ops.rank(), cgx_ops.size()
WORLD = cgx_ops.init()
SIZES = (5000, 600, 17, 0)
CARRIERS = ("native", "c10d")

_names = iter(f"call {n}" for n in range(10**6))


def seed_of(config: Config, name: str, depth: int = 0) -> int:
    """Return the seed of the first call of this name, or of its gradient, by drawing it again."""
    if config.compressor == "randk":
        seed = tc.gradient_seed(tc.named_seed(0, name), 1)
    else:
        seed = tc.drawn_seeds(100 + RANK)[0]
    torch.manual_seed(100 + RANK)
    return tc.gradient_seed(seed, depth) if depth else seed


def by_numpy(
    xs: list[torch.Tensor], config: Config, seed: int, residuals: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Return averages of a list, which is one message; residuals are changed in place."""
    offsets = [sum(x.numel() for x in xs[:i]) for i in range(len(xs))]
    segments = [cgx_ops.Segment(at, x.numel()) for at, x in zip(offsets, xs, strict=True)]
    flat = tc.to_numpy(torch.cat([x.flatten() for x in xs])).copy()
    kept = None if residuals is None else tc.to_numpy(torch.cat(residuals)).copy()
    y = WORLD.allreduce(flat, "avg", config, segments=segments, seed=seed, residual=kept)

    def split(array: Any) -> list[torch.Tensor]:
        whole = tc.from_numpy(array)
        return [
            whole[at : at + x.numel()].reshape(x.shape) for at, x in zip(offsets, xs, strict=True)
        ]

    if residuals is not None:
        for residual, new in zip(residuals, split(kept), strict=True):
            residual.copy_(new)
    return split(y)


def single_calls_match_numpy() -> None:
    for config in CONFIGS:
        for dtype in (torch.float32, torch.bfloat16):
            for carrier in CARRIERS:
                for numel in SIZES:
                    x, name = tc.values(RANK, numel, dtype), next(_names)
                    seed = seed_of(config, name)
                    y = tc.allreduce(x, op="avg", name=name, carrier=carrier, config=str(config))
                    (want,) = by_numpy([x], config, seed)
                    assert tc.same_bits(y, want), (config, dtype, carrier, numel)


def lists_match_numpy() -> None:
    """Test lists as one message: new, in place, and with residuals over two steps."""
    for config in CONFIGS:
        xs = [tc.values(RANK, numel, call=i) for i, numel in enumerate((700, 40, 3, 1200))]
        for carrier in CARRIERS:
            options = {"op": "avg", "carrier": carrier, "config": str(config)}
            name = next(_names)
            seed = seed_of(config, name)
            want = by_numpy(xs, config, seed)
            for y, expected in zip(tc.coalesced(xs, name=name, **options), want, strict=True):
                assert tc.same_bits(y, expected), (config, carrier)
            name, x = next(_names), xs[0].clone()
            seed = seed_of(config, name)
            (expected,) = by_numpy([x], config, seed)
            tc.allreduce_(x, name=name, **options)
            assert tc.same_bits(x, expected), (config, carrier)
            if config not in FEEDBACK:
                continue
            mine, numpys = ([torch.zeros_like(x) for x in xs] for _ in range(2))
            for _ in range(2):
                name = next(_names)
                seed = seed_of(config, name)
                want = by_numpy(xs, config, seed, numpys)
                ys, mine = tc.feedback_list(xs, mine, name=name, **options)
                for got, expected in zip([*ys, *mine], [*want, *numpys], strict=True):
                    assert tc.same_bits(got, expected), (config, carrier)


def gradients_match_numpy() -> None:
    for config in CONFIGS:
        for carrier in CARRIERS:
            x, name = tc.values(RANK, 900).requires_grad_(), next(_names)
            seed = seed_of(config, name, depth=1)
            y = tc.allreduce(x, op="avg", name=name, carrier=carrier, config=str(config))
            y.backward(upward := tc.values(RANK, 900, call=1))
            (want,) = by_numpy([upward], config, seed)
            assert x.grad is not None
            assert tc.same_bits(x.grad, want), (config, carrier)


def indices_depend_on_call_index() -> None:
    """Check that indices are equal on ranks with different generators, but differ between calls."""
    config = next(each for each in CONFIGS if each.compressor == "randk")
    x = tc.values(RANK, 600)
    for name in ("", "named"):
        ys = [tc.allreduce(x, name=name, config=str(config)) for _ in range(2)]
        everyones: list[Any] = [None] * SIZE
        dist.all_gather_object(everyones, ys)
        for other in everyones:
            assert tc.same_bits(other[0], ys[0])
        assert not torch.equal(ys[0] != 0, ys[1] != 0)


def mismatched_settings() -> None:
    """Check that every rank gets an error for mismatched settings, and the next call works."""
    other = {"compressor": "topk", "density": 0.1 if RANK else 0.2, "bucket_size": 64}
    for options, words in (
        (other, "density"),
        ({"compressor": "topk" if RANK else "levels"}, "compressor"),
        ({"compressor": "topk", "value_bits": 8 if RANK else 16}, "value_bits"),
        ({"rotation": 32 if RANK else None}, "rotation"),
        ({"compressor": "ternary", "clip": bool(RANK)}, "clip"),
        # Names determine the indices; they are not compared if torch carries the messages.
        *(
            (
                {"compressor": "randk", "name": f"of {RANK}", "carrier": "c10d", "algorithm": by},
                "the seed of the random indices",
            )
            for by in ("one_shot", "sra")
        ),
    ):
        try:
            tc.allreduce(tc.values(RANK, 600), **tc.keywords(**options))
        except dist.DistBackendError as error:
            assert words in str(error) and "against" in str(error), error
        else:
            raise AssertionError(f"no error for {words}")
    tc.allreduce(tc.values(RANK, 600))


def in_graphs() -> None:
    """Compile functions, with feedback too, and compare forward and backward for both carriers."""
    wanted = {"topk", "levels", "sign", "ternary", "randk"}
    for config in CONFIGS:
        if config.compressor not in wanted or config.rotation:
            continue
        wanted.remove(config.compressor)
        for carrier in CARRIERS:
            torch._dynamo.reset()  # it limits the number of compilations of a function
            name = next(_names)
            options = {"op": "avg", "name": name, "carrier": carrier, "config": str(config)}

            @torch.compile(fullgraph=True)
            def step(x: torch.Tensor, options: Any = options) -> torch.Tensor:
                return 2 * tc.allreduce(2 * x, **options)

            x = tc.values(RANK, 1000).requires_grad_()
            upward = tc.values(RANK, 1000, call=1)
            seed = seed_of(config, name, depth=1)
            (gradient,) = by_numpy([2 * upward], config, seed)
            seed = seed_of(config, name)
            (want,) = by_numpy([2 * x.detach()], config, seed)
            y = step(x)
            y.backward(upward)
            assert tc.same_bits(y, 2 * want), (config, carrier)
            assert x.grad is not None
            assert tc.same_bits(x.grad, 2 * gradient), (config, carrier)
            if config not in FEEDBACK:
                continue
            name = next(_names)
            options = {**options, "name": name}

            @torch.compile(fullgraph=True)
            def corrected(
                x: torch.Tensor, e: torch.Tensor, options: Any = options
            ) -> tuple[torch.Tensor, torch.Tensor]:
                return tc.feedback(2 * x, e, **options)

            x, residual = tc.values(RANK, 1000), tc.values(RANK, 1000, call=2) / 8
            seed, kept = seed_of(config, name), [residual.clone()]
            (want,) = by_numpy([2 * x], config, seed, kept)
            corrected_y, new = corrected(x, residual)
            assert tc.same_bits(corrected_y, want), (config, carrier)
            assert tc.same_bits(new, kept[0]), (config, carrier)
    assert not wanted, wanted


def main() -> None:
    tc.forget_compiled_graphs()
    dist.init_process_group("gloo")
    checks.run(
        checks.named(
            single_calls_match_numpy, lists_match_numpy, gradients_match_numpy,
            indices_depend_on_call_index, mismatched_settings, in_graphs,
        )
    )  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
