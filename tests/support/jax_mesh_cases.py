"""The meshes of the JAX tests: eight devices, of one process or of several.

Their orders are chosen so that groups have devices of one process, of every process, and some of
each, for one, two, four or eight processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from support.jax_cases import has_part_in, mesh_of, processes_of, ranks_of, same_bits, seed_of


@dataclass(frozen=True)
class MeshCase:
    """A mesh, and the axes over which to reduce.

    Attributes:
        name: used in the test's id.
        shape: the mesh's shape; its axes are "a", "b".
        axes: the axes that form the groups.
        order: indices of jax.devices() in mesh order; None: the first ones.
    """

    name: str
    shape: tuple[int, ...]
    axes: str | tuple[str, ...]
    order: tuple[int, ...] | None = None

    @property
    def devices(self) -> list[int]:
        return list(self.order or range(int(np.prod(self.shape))))

    @property
    def mesh(self) -> Mesh:
        """Return the mesh; skip the test if this process has no device of it."""
        axes = ("a", "b")[: len(self.shape)]
        mesh = mesh_of(self.shape, axes, [jax.devices()[device] for device in self.devices])
        if not has_part_in(mesh):
            pytest.skip("this process has no device of the mesh")
        return mesh

    @property
    def groups(self) -> list[list[int]]:
        """The positions in the mesh of each group's members, in order."""
        axes = [self.axes] if isinstance(self.axes, str) else self.axes
        places = np.arange(len(self.devices)).reshape(self.shape)
        last = np.moveaxis(places, ["ab".index(axis) for axis in axes], range(-len(axes), 0))
        size = int(np.prod([self.shape["ab".index(axis)] for axis in axes]))
        return last.reshape(-1, size).tolist()

    @property
    def is_even(self) -> bool:
        """Whether the processes of each group have equal numbers of its devices."""
        processes = processes_of(self.devices)
        ranks = [ranks_of([processes[place] for place in group]) for group in self.groups]
        return len({tuple(map(len, group)) for group in ranks}) == 1 and all(
            len(set(map(len, group))) == 1 for group in ranks
        )

    def seed(self, key: jax.Array, place: int, check_vma: bool) -> int:
        """Return the seed of the device at a position; checked types include the varying axes."""
        others = [axis for axis in "ab"[: len(self.shape)] if axis not in self.axes]
        where = dict(zip("ab", np.unravel_index(place, self.shape), strict=False))
        at = [int(where[axis]) for axis in others] if check_vma else []
        return seed_of(key, call=f"allreduce over {','.join(self.axes)}: ", at=at)

    def check(self, rows: Any, want: Callable[[list[int], list[int]], Any]) -> None:
        """Require that every device has the bits want(places, devices) of its group."""
        for group in self.groups:
            wanted = want(group, [self.devices[place] for place in group])
            for place in group:
                assert same_bits(rows[place], wanted), f"at {place} of {group} on {self.name}"


MESHES: Sequence[MeshCase] = [
    MeshCase("one_axis", (8,), "a"),
    MeshCase("inner", (2, 4), "b"),
    MeshCase("outer", (4, 2), "a"),
    MeshCase("both", (2, 4), ("a", "b")),
    MeshCase("swapped", (2, 4), ("b", "a")),
    MeshCase("mixed_inner", (2, 4), "b", (0, 5, 2, 7, 4, 1, 6, 3)),
    MeshCase("mixed_outer", (2, 4), "a", (0, 5, 2, 7, 4, 1, 6, 3)),
    MeshCase("uneven", (2, 4), "b", (3, 1, 7, 0, 2, 6, 5, 4)),
    MeshCase("part", (4,), "a", (6, 1, 2, 5)),
    MeshCase("uneven_part", (3,), "a", (1, 6, 0)),
]

# Daily runs test each carrier and each mode, but not each combination.
carriers_and_modes = pytest.mark.parametrize(
    ("carrier", "check_vma"),
    [
        ("native", True),
        ("xla", False),
        pytest.param("native", False, marks=pytest.mark.exhaustive),
        pytest.param("xla", True, marks=pytest.mark.exhaustive),
    ],
)
