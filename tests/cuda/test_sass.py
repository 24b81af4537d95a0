"""The loops that support.sass finds in short programs. An instruction has 16 bytes."""

import pytest
from support import sass


def _code(program: str) -> dict[int, sass.Instruction]:
    """Write instructions as cuobjdump does: with addresses, and the code of each in two words."""
    lines = [line.strip() for line in program.strip().splitlines()]
    listing = "\t.target\tsm_90\n\n\t\tFunction : kernel\n"
    for number, line in enumerate(lines):
        listing += f"        /*{number * 16:04x}*/  {line} ;  /* 0x0000000a00147947 */\n"
        listing += "                                /* 0x000fea0003800000 */\n"
    return sass.parse(listing)


def _loading(program: str) -> list[tuple[int, int]]:
    """Return the first address and the number of instructions of each loop that loads."""
    return [(loop.start, len(loop)) for loop in sass.loading_loops(_code(program))]


def test_instructions_have_an_operation_and_operands() -> None:
    code = _code("@!P0 LDG.E.EF.128 R4, desc[UR6][R2.64+0x10]\nEXIT\nBRA 0x10\nNOP")
    assert list(code) == [0x00, 0x10, 0x20, 0x30]
    assert code[0] == sass.Instruction(0, True, "LDG.E.EF.128", "R4, desc[UR6][R2.64+0x10]")
    assert code[0x30] == sass.Instruction(0x30, False, "NOP", "")


@pytest.mark.parametrize(
    ("operation", "width"),
    [("LDG.E.U8", 1), ("LDG.E.U16.CONSTANT", 2), ("LDG.E", 4), ("STG.E.EF.64", 8)],
)
def test_bytes(operation: str, width: int) -> None:
    assert _code(f"{operation} R2, [R4.64]")[0].bytes == width


def test_no_loop() -> None:
    # After its end, a kernel has a branch to itself, and padding.
    assert (
        _loading("LDG.E R2, [R2.64]\n@P0 EXIT\nSTG.E [R4.64], R2\nEXIT\nBRA 0x40\nNOP\nNOP") == []
    )


ONE = """
    S2R R0, SR_TID.X
    @P0 EXIT
    LDG.E.64 R2, [R4.64]
    @P1 BRA 0x50
    FADD R2, R2, R3
    STG.E [R6.64], R2
    {branch}
    EXIT
    BRA 0x80
    NOP
"""


@pytest.mark.parametrize(
    "branch",
    ["@!P2 BRA 0x20", "BRA P3, 0x20", "@P2 BRA !P3, 0x20", "BRA.U UP0, 0x20", "BRA 0x20"],
)
def test_one_loop(branch: str) -> None:
    assert _loading(ONE.format(branch=branch)) == [(0x20, 5)]


@pytest.mark.parametrize("load", ["LDGSTS.E.BYPASS.128 [R1], [R4.64]", "LD.E R2, [R4]"])
def test_loads_of_global_memory(load: str) -> None:
    program = ONE.format(branch="@P0 BRA 0x20").replace("LDG.E.64 R2, [R4.64]", load)
    assert _loading(program) == [(0x20, 5)]


@pytest.mark.parametrize(
    "load", ["LDS.128 R4, [R1]", "LDL R2, [R1]", "LDC R1, c[0x0]", "LDGDEPBAR"]
)
def test_other_loads(load: str) -> None:
    program = ONE.format(branch="@P0 BRA 0x20").replace("LDG.E.64 R2, [R4.64]", load)
    assert len(sass.loops(_code(program))) == 1
    assert _loading(program) == []


def test_nested_loops() -> None:
    outer, inner = sass.loading_loops(
        _code("""
            S2R R0, SR_TID.X
            LDG.E R2, [R4.64]
            LDG.E R3, [R6.64]
            FADD R2, R2, R3
            @P0 BRA 0x20
            STG.E [R8.64], R2
            @P1 BRA 0x10
            EXIT
        """)
    )
    assert (outer.start, len(outer)) == (0x10, 6)
    assert (inner.start, len(inner)) == (0x20, 3)
    assert inner in outer
    assert outer not in inner
    assert inner not in inner


def test_a_nested_loop_without_a_load_counts_as_instructions() -> None:
    program = """
        LDG.E R2, [R4.64]
        STG.E [R6.64], R2
        @P0 BRA 0x10
        @P1 BRA 0x0
        EXIT
    """
    assert len(sass.loops(_code(program))) == 2
    assert _loading(program) == [(0x00, 4)]


def test_a_loop_around_the_one_that_loads() -> None:
    program = """
        S2R R0, SR_TID.X
        LDG.E R2, [R4.64]
        @P0 BRA 0x10
        @P1 BRA 0x0
        EXIT
    """
    assert len(sass.loops(_code(program))) == 2
    assert _loading(program) == [(0x10, 2)]


def test_hot_loop_is_the_innermost_that_loads() -> None:
    program = """
        LDG.E R2, [R4.64]
        LDG.E R3, [R6.64]
        @P0 BRA 0x10
        @P1 BRA 0x30
        @P2 BRA 0x0
        EXIT
    """
    code = _code(program)
    inner = sass.hot_loop(code)
    assert (inner.start, len(inner)) == (0x10, 2)
    outer = sass.loop_around(code, inner)
    assert (outer.start, len(outer)) == (0x00, 5)
    with pytest.raises(LookupError, match="0x0 is in no other loop"):
        sass.loop_around(code, outer)


def test_two_loops() -> None:
    program = """
        LDG.E R2, [R4.64]
        FADD R3, R3, R2
        @P0 BRA 0x0
        LDG.E R2, [R4.64]
        @P0 BRA 0x30
        EXIT
    """
    assert _loading(program) == [(0x00, 3), (0x30, 2)]
    with pytest.raises(LookupError, match=r"2 innermost loops .*: 0x0, 0x30"):
        sass.hot_loop(_code(program))


def test_several_branches_to_one_start_are_one_loop() -> None:
    program = """
        LDG.E R2, [R4.64]
        @P0 BRA 0x0
        STG.E [R6.64], R2
        @P1 BRA 0x0
        EXIT
    """
    assert _loading(program) == [(0x00, 4)]


def test_a_part_of_a_loop_behind_the_end() -> None:
    # As after BRA.DIV: the last two instructions belong to the loop, and form none.
    program = """
        LDG.E R2, [R4.64]
        BRA.DIV UR4, 0x50
        STG.E [R6.64], R2
        @P0 BRA 0x0
        EXIT
        WARPSYNC.COLLECTIVE R3, 0x60
        BRA 0x20
        BRA 0x70
        NOP
    """
    assert len(sass.loops(_code(program))) == 1
    assert _loading(program) == [(0x00, 6)]


def test_code_between_that_leaves_the_loop_does_not_count() -> None:
    program = """
        LDG.E R2, [R4.64]
        @!P0 BRA 0x40
        STG.E [R6.64], R2
        EXIT
        @P1 BRA 0x0
        EXIT
    """
    assert _loading(program) == [(0x00, 3)]


def test_functions() -> None:
    # The loop calls a function twice. The function's own loop loads.
    program = """
        CALL.REL.NOINC 0x50
        CALL.REL.NOINC 0x50
        @P0 BRA 0x0
        EXIT
        NOP
        LDG.E R2, [R4.64]
        @P0 BRA 0x50
        RET.REL.NODEC R20 0x0
    """
    assert [len(loop) for loop in sass.loops(_code(program))] == [3, 2]
    assert _loading(program) == [(0x50, 2)]


def test_barriers_are_no_jumps() -> None:
    program = """
        BSSY B0, 0x40
        @P0 BRA 0x30
        LDG.E R2, [R4.64]
        BSYNC B0
        WARPSYNC 0xffffffff
        EXIT
    """
    assert sass.loops(_code(program)) == []


def test_indirect_branches_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="BRX at 0x10"):
        sass.loops(_code("S2R R0, SR_TID.X\nBRX R2 -0x520\nEXIT"))
