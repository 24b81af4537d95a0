"""Print the --help of several programs in one process, because imports take longest."""

import contextlib
import io
import runpy
import sys
from pathlib import Path

METHODS = Path(__file__).resolve().parents[2] / "examples" / "methods"


def main() -> None:
    sys.path.append(str(METHODS))  # the path that benchmarks of methods use
    for name in sys.argv[1:]:
        path = Path(name)
        sys.argv = [name, "--help"]
        sys.path.insert(0, str(path.parent))
        shown = io.StringIO()
        try:
            with contextlib.redirect_stdout(shown):
                runpy.run_path(name, run_name="__main__")
            raise RuntimeError(f"{name} ran without parsing its arguments")
        except SystemExit as end:
            if end.code or "usage:" not in shown.getvalue():
                raise RuntimeError(f"{name} --help ends with {end.code}") from end
        finally:
            sys.path.remove(str(path.parent))


if __name__ == "__main__":
    main()
