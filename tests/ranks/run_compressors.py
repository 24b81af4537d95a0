"""Print two digests for every case of core/test_compressors.py, computed by this process's kernels.

The digests (JSON) are of the encoded bytes and of the decoded values. A process selects its kernels
once, so the test starts this program once for each CPU target.
"""

import json

from support.compressor_cases import CASES, library_digests

print(json.dumps([library_digests(*case) for case in CASES]))
