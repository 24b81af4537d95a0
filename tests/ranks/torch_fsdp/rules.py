"""Rules that give layers bits and bucket sizes by name."""

from torch import nn

from cgx_ops import Config, Rules
from cgx_ops.torch import fsdp

from .common import FEW, Model, batch, equals_the_oracle, own_parameters, recorded, sharded
from .refusals import warned


def rules_by_name() -> None:
    """Check precedence: rules override exact_vectors, and exact directions ignore rules."""
    rules = Rules(
        [
            (r"head\.weight", 32),
            (r"blocks\.1\.", 8),
            (r"^blocks\..*\.weight$", {"bits": 2, "bucket_size": 32}),
        ]
    )
    b, k = FEW.bits, FEW.bucket_size
    table = {  # bits and bucket size that the rules give
        **{f"blocks.{i}.{layer}.weight": (2, 32) for i in (0, 2) for layer in ("norm", "linear")},
        **{f"blocks.1.{layer}.weight": (8, 32) for layer in ("norm", "linear")},
        **{f"blocks.1.{layer}.bias": (8, k) for layer in ("norm", "linear")},
        "head.weight": (32, k),
    }
    x, y = batch(0)
    for gradients in (FEW, None):
        model = sharded(Model())
        fsdp.compress(model, gradients, FEW, rules=rules)
        with recorded() as messages:
            nn.functional.cross_entropy(model(x), y).backward()
        assert all(equals_the_oracle(m) for m in messages)
        plain, ruled = [], []
        for module, prefix in (
            (model, ""),
            *((b, f"blocks.{i}.") for i, b in enumerate(model.blocks)),
        ):
            named = [(prefix + name, p) for name, p in own_parameters(module)]
            default = [32 if p.ndim == 1 else b for _, p in named]
            plain.append([(32, Config().bucket_size)] * len(named))
            ruled.append(
                [table.get(n, (own, k)) for (n, _), own in zip(named, default, strict=True)]
            )
        for message in messages:
            exact = gradients is None and message.verb == "reduce_scatter"
            assert message.config.bits == (32 if exact else 4)
            found = [(s.config.bits, s.config.bucket_size) for s in message.segments if s.config]
            assert found in (plain if exact else ruled), (message.verb, found)
    (text,) = warned(lambda: fsdp.compress(model, FEW, rules=rules.with_first(("typo", 2))))
    assert "no layer matches 'typo'" in text


CHECKS = [rules_by_name]
