"""The C++ tests of a single process, built next to libcgx.so and run by ctest."""

import pytest
from support import cpp_programs


@pytest.mark.timeout(900)
def test_cpp() -> None:
    folder = cpp_programs.build()
    ctest = cpp_programs.tool("ctest")
    options = ("--parallel", 2, "--output-on-failure", "--no-tests=error")
    cpp_programs.run(ctest, "--test-dir", folder, *options)
