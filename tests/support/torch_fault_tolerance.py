"""Run torch's own tests of groups that change their members, on gloo and "cgx".

    python -m support.torch_fault_tolerance FILE [arguments of unittest]

FILE is test/distributed/test_c10d_fault_tolerance.py of torch's repository, which its wheels do not
contain. Requires torch 2.14 and the package expecttest.
"""

import sys
import unittest
from pathlib import Path

import cgx_ops.torch  # noqa: F401  (registers the backend)

_BACKENDS = '    ("gloo", "cpu"),\n'
_MAIN = 'if __name__ == "__main__":\n    run_tests()\n'

# The tests spawn processes that import this module again, and look up their classes here.
source = Path(sys.argv[1]).read_text()
assert source.count(_BACKENDS) == source.count(_MAIN) == 1, "these are other tests"
source = source.replace(_BACKENDS, f'{_BACKENDS}    ("cgx", "cpu"),\n').replace(_MAIN, "")
exec(compile(source, sys.argv[1], "exec"))

if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
