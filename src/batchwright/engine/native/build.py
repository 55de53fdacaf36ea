"""Libraries of compiled kernels: those that a wheel contains for this processor, or those compiled here, once.

A wheel for x86-64 has kernels (`shipped.py`). Elsewhere, and on a processor with more features than they use, kernels
are compiled with this compiler for this processor into the cache folder. Without a compiler, or if compiling fails, the
best shipped ones are used; if there are none, `library_path` says why and the engine runs on torch alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from batchwright.cgroups import threads_for
from batchwright.durable_files import sync
from batchwright.engine.native.shipped import shipped_library
from batchwright.models import cache_dir
from batchwright.models.cache import CACHE_VARIABLE, Progress, locked, remove_abandoned

_HERE = Path(__file__).parent
SOURCES = tuple(
    _HERE / name for name in ("attention.cpp", "decoder.cpp", "elementwise.cpp", "multi_step.cpp", "sampling.cpp")
)
"""Sources of the engine's own kernels."""
_HEADERS = tuple(sorted(_HERE.glob("*.h")))
"""Headers that any source may include."""
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")

_COMPILING = "compiling kernels for this processor, once:"


class BuildError(Exception):
    """The kernels could not be compiled; the message says why."""


def library_path(
    name: str = "kernels", sources: tuple[Path, ...] = SOURCES, progress: Progress = lambda text: None
) -> Path:
    """Return the library of `sources`: a shipped one, or one compiled now if it is not in the cache.

    Of several processes one compiles, and the others wait for it. Meanwhile `progress` is called with a line of text.
    Raises `BuildError` if there is none.
    """
    shipped = shipped_library(name, processor())
    if shipped is not None and shipped.complete:
        return shipped.path
    try:
        return _compiled_here(name, sources, progress)
    except BuildError:
        if shipped is None:
            raise
        return shipped.path


def _compiled_here(name: str, sources: tuple[Path, ...], progress: Progress) -> Path:
    if platform.system() != "Linux":
        raise BuildError(f"compiled kernels are for Linux, this is {platform.system()}")
    compiler = find_compiler()
    target = "-march=native" if platform.machine() in {"x86_64", "AMD64"} else "-mcpu=native"
    library = _compiled_folder() / f"{name}-{_key(compiler, target, sources)}.so"
    if library.exists():
        return library
    root = cache_dir()
    try:
        with _turn_to_compile(root, library, progress):
            if not library.exists():
                remove_abandoned(root, library.stem, _work_folders(library.parent))
                compile_library(compiler, (target,), sources, library, progress)
    except OSError as error:
        raise BuildError(
            f"cannot compile into {root}: {error}; free some space there, or set {CACHE_VARIABLE} to a folder that can "
            "be written"
        ) from error
    return library


@contextmanager
def _turn_to_compile(root: Path, library: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock of `library`. A `BuildError` while it is held is also that of the processes that wait for it.

    Otherwise each of them would compile for minutes, one after another, and fail in the same way.
    """
    failure, waited = root / "locks" / f"{library.stem}.failed", False

    def wait(_: str) -> None:
        nonlocal waited
        waited = True
        progress("another process is compiling the kernels; waiting for it")

    with locked(root, library.stem, wait):
        if waited and failure.exists():
            raise BuildError(failure.read_text(encoding="utf-8"))
        failure.unlink(missing_ok=True)
        try:
            yield
        except BuildError as error:
            failure.write_text(str(error), encoding="utf-8", errors="replace")
            raise


def _work_folders(folder: Path) -> list[tuple[str, Path]]:
    """Return the folders in which libraries are compiled, with their keys; empty if `folder` does not exist."""
    return [(path.name.rpartition("-")[0], path) for path in folder.glob("*-*") if path.is_dir()]


def _compiled_folder() -> Path:
    return cache_dir() / "native"


def find_compiler() -> str:
    """Return the path of the C++ compiler: `$CXX`, or the first of the usual ones. Raises `BuildError`."""
    chosen = os.environ.get("CXX")
    compilers = (chosen,) if chosen else ("g++", "clang++", "c++")
    compiler = next((path for each in compilers if (path := shutil.which(each))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(compilers)})")
    return compiler


def load_library(name: str = "kernels", sources: tuple[Path, ...] = SOURCES) -> ctypes.CDLL | str:
    """Load the library of `sources`, or return why there is none. `BATCHWRIGHT_NATIVE=0` disables it."""
    if _turned_off():
        return "turned off by BATCHWRIGHT_NATIVE=0"
    try:
        path = library_path(name, sources)
        # torch has loaded its OpenMP runtime by now; the library shares it, and with it its threads.
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            if path.parent != _compiled_folder():
                raise
            path.unlink(missing_ok=True)  # damaged, for example by a full disk or a power loss: compiled again
            return ctypes.CDLL(str(library_path(name, sources)))
    except (BuildError, OSError) as error:
        return str(error)


def prepare_library(name: str = "kernels", sources: tuple[Path, ...] = SOURCES, *, progress: Progress) -> None:
    """Compile `sources` if `load_library` would do so now. Errors are left to `load_library`."""
    with suppress(BuildError):
        if not _turned_off():
            library_path(name, sources, progress)


def _turned_off() -> bool:
    return os.environ.get("BATCHWRIGHT_NATIVE") == "0"


def _key(compiler: str, target: str, sources: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for path in (*sources, *_HEADERS):
        digest.update(path.read_bytes())
    version = _run([compiler, "--version"]).partition("\n")[0]
    for text in (*_FLAGS, target, version, processor()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


@cache
def processor() -> str:
    """Return the features on which `-march=native` depends: different machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "model name", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def compile_library(
    compiler: str, options: tuple[str, ...], sources: tuple[Path, ...], library: Path, progress: Progress
) -> None:
    """Compile each source separately, as many at a time as there are processors, and link `library`.

    `options` are compiler options in addition to those of all kernels. Raises `BuildError`, and OSError if the folder
    of `library` cannot be written.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{library.stem}-", dir=library.parent) as name:
        flags = [compiler, *_FLAGS, *options, f"-I{_HERE}"]
        objects = [str(Path(name) / f"{source.stem}.o") for source in sources]
        commands = [[*flags, "-c", str(source), "-o", made] for source, made in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(threads_for(len(os.sched_getaffinity(0)))) as pool:
            compiled = [pool.submit(_run, command) for command in commands]
            progress(f"{_COMPILING} 0 of {len(commands)}")
            for done, each in enumerate(as_completed(compiled), start=1):
                each.result()
                progress(f"{_COMPILING} {done} of {len(commands)}")
        whole = Path(name) / library.name
        _run([*flags, "-shared", *objects, "-o", str(whole)])
        sync(whole)
        whole.replace(library)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
