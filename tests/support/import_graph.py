"""The imports among the modules of cgx_ops, from the sources, including late and typing imports."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

Graph = Mapping[str, set[str]]


class Modules:
    """The modules below a folder, by their dotted names."""

    def __init__(self, folder: Path) -> None:
        self.paths = {_name(folder, path): path for path in sorted(folder.rglob("*.py"))}
        self.faces = {name for name, path in self.paths.items() if path.name == "__init__.py"}
        self._trees = {name: ast.parse(path.read_text()) for name, path in self.paths.items()}

    def graph(self) -> Graph:
        """Return each module's imports. A name exported by a package counts for its own module."""
        return {name: set(self._imports(name)) - {name} for name in self.paths}

    def _imports(self, name: str) -> Iterator[str]:
        for node in ast.walk(self._trees[name]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.paths)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if found := self._home(node.module, alias.name):
                        yield found

    def _home(self, module: str, name: str) -> str | None:
        """Return the module that defines a name which `module` has, or that is this name."""
        if f"{module}.{name}" in self.paths:
            return f"{module}.{name}"
        if module not in self.faces:
            return module if module in self.paths else None
        for node in self._trees[module].body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self._home(node.module, alias.name)
        compiled = self.paths[module].with_name(f"{name}.pyi").exists()
        return None if compiled else module


def _name(folder: Path, path: Path) -> str:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def joined(graph: Graph, part_of: Mapping[str, str]) -> Graph:
    """Return the graph of the parts that contain the modules."""
    parts: dict[str, set[str]] = {part: set() for part in part_of.values()}
    for name, imported in graph.items():
        parts[part_of[name]] |= {part_of[other] for other in imported} - {part_of[name]}
    return parts


def floors(graph: Graph) -> dict[str, int]:
    """Return the level of each node: one above everything that it imports, from 1.

    Raises:
        AssertionError: nodes import each other in a cycle, which the message lists.
    """
    heights: dict[str, int] = {}

    def height(node: str, above: tuple[str, ...]) -> int:
        assert node not in above, f"a circle: {' -> '.join((*above, node))}"
        if node not in heights:
            below = (height(other, (*above, node)) for other in sorted(graph[node]))
            heights[node] = 1 + max(below, default=0)
        return heights[node]

    for node in sorted(graph):
        height(node, ())
    return heights
