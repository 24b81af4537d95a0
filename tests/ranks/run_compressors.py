"""Program: digests of what this process's kernels make of every case of core/test_compressors.py.

It is run once for each CPU target, which is chosen once in a process. JSON: two digests a case, of
the bytes and of what they decode to.
"""

import json

from support.compressor_cases import CASES, library_digests

print(json.dumps([library_digests(*case) for case in CASES]))
