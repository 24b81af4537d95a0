"""Loops in the machine code of a GPU kernel (SASS), from the text that cuobjdump prints."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

# An instruction: its address, predicate, operation and operands. `/*0100*/ @!P0 BRA 0x40 ;`
INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<predicate>@\S+\s+)?"
    r"(?P<operation>[A-Z]\S*?)(?:\s+(?P<operands>[^;]*?))?\s*;",
    re.MULTILINE,
)

# LDGSTS copies from global to shared memory, and the address of LD is generic. LDGDEPBAR waits;
# LDS, LDL and LDC read other memory.
GLOBAL_LOAD = re.compile(r"(LDG|LDGSTS|LD)(\.|$)")

JUMP = re.compile(r"(BRA|CALL|WARPSYNC\.COLLECTIVE)(\.|$)")  # to the last operand
END = re.compile(r"(EXIT|RET|KILL)(\.|$)")
UNKNOWN_TARGET = re.compile(r"(BRX|BRXU|JMP|JMX|JMXU)(\.|$)")


@dataclass(frozen=True)
class Instruction:
    address: int
    predicated: bool
    operation: str
    operands: str

    @property
    def loads(self) -> bool:
        """Whether it can read global memory."""
        return GLOBAL_LOAD.match(self.operation) is not None

    @property
    def bytes(self) -> int:
        """What a load or a store of this type moves."""
        widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
        return next((widths[part] for part in self.operation.split(".") if part in widths), 4)

    @property
    def target(self) -> int | None:
        """The address of the jump. A call counts as one, so that functions are part of the code."""
        if UNKNOWN_TARGET.match(self.operation):
            raise NotImplementedError(f"{self.operation} at {self.address:#x}: unknown targets")
        return int(self.operands.split()[-1], 16) if JUMP.match(self.operation) else None

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction can follow."""
        if self.predicated:
            return True
        # The condition may be an operand, too: `BRA !P3, 0x90`, `BRA.DIV UR4, 0x90`.
        always = self.operation.startswith("BRA") and "," not in self.operands
        return not always and END.match(self.operation) is None


@dataclass(frozen=True)
class Loop:
    """A natural loop: the instructions that can run between two visits of its first one.

    A compiler usually places them side by side, from the target of the backward branch to that
    branch. They include nested loops, but not the functions that the loop calls.
    """

    start: int
    body: frozenset[int]  # addresses

    def __len__(self) -> int:
        return len(self.body)

    def __contains__(self, other: "Loop") -> bool:
        return other.body < self.body


def parse(listing: str) -> dict[int, Instruction]:
    """Return the instructions of a kernel by address, in this order."""
    found = (
        Instruction(
            int(each["address"], 16),
            each["predicate"] is not None,
            each["operation"],
            each["operands"] or "",
        )
        for each in INSTRUCTION.finditer(listing)
    )
    return {each.address: each for each in found}


def loops(code: Mapping[int, Instruction]) -> list[Loop]:
    """Return all loops that can run, the largest first."""
    following = _following(code)
    entry = next(iter(code))
    reachable = _reachable(entry, following)
    preceding = defaultdict(list)
    for address in reachable:
        for after in following[address]:
            preceding[after].append(address)
    found = []
    for start in reachable:
        if len(preceding[start]) < 2 and start != entry:
            continue
        # A branch back to the start of a loop cannot be reached without passing this start.
        outside = _reachable(entry, following, without=start)
        ends = [address for address in preceding[start] if address not in outside]
        if ends:
            body = {start}.union(*(_reachable(end, preceding, without=start) for end in ends))
            found.append(Loop(start, frozenset(body)))
    return sorted(found, key=len, reverse=True)


def loading_loops(code: Mapping[int, Instruction]) -> list[Loop]:
    """Return the loops that load from global memory outside of their nested loops."""
    found = loops(code)
    loads = {address for address, instruction in code.items() if instruction.loads}
    return [
        loop
        for loop in found
        if (loads & loop.body).difference(*(other.body for other in found if other in loop))
    ]


def hot_loop(code: Mapping[int, Instruction]) -> Loop:
    """Return the innermost loop that loads from global memory.

    Raises:
        LookupError: There is none, or several.
    """
    found = loading_loops(code)
    innermost = [loop for loop in found if not any(other in loop for other in found)]
    if len(innermost) != 1:
        starts = ", ".join(f"{loop.start:#x}" for loop in innermost)
        raise LookupError(f"{len(innermost)} innermost loops load from global memory: {starts}")
    return innermost[0]


def loop_around(code: Mapping[int, Instruction], inner: Loop) -> Loop:
    """Return the smallest loop that contains another one.

    Raises:
        LookupError: There is none.
    """
    around = [loop for loop in loops(code) if inner in loop]
    if not around:
        raise LookupError(f"the loop at {inner.start:#x} is in no other loop")
    return around[-1]


def _following(code: Mapping[int, Instruction]) -> dict[int, list[int]]:
    addresses = list(code)
    following = {}
    for address, after in zip(addresses, [*addresses[1:], None], strict=True):
        instruction = code[address]
        nexts = [after if instruction.falls_through else None, instruction.target]
        following[address] = [each for each in nexts if each is not None]
    return following


def _reachable(
    start: int, graph: Mapping[int, list[int]], *, without: int | None = None
) -> set[int]:
    seen, waiting = set[int](), [start]
    while waiting:
        address = waiting.pop()
        if address != without and address not in seen:
            seen.add(address)
            waiting.extend(graph[address])
    return seen
