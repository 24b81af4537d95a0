"""The Python code on the pages of the documentation."""

import re
import textwrap

_BLOCK = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def python_blocks(text: str) -> list[str]:
    """Return the code of all blocks that begin with ```python, without their indentation."""
    return [textwrap.dedent(block) for block in _BLOCK.findall(text)]
