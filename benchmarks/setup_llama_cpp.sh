#!/usr/bin/env bash
# Build llama.cpp with its Python bindings into a virtual environment of its own, .bench/llama-cpp, where
# benchmarks/engine.py finds it: from source, so that it uses all that this processor has. Needs a C++ compiler and
# takes some minutes. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=.bench/llama-cpp

"${PYTHON:-python3}" -m venv "$folder"
CMAKE_ARGS="-DGGML_NATIVE=ON" "$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
  --no-binary llama-cpp-python llama-cpp-python==0.3.36
"$folder/bin/python" -c 'import llama_cpp as l; print("llama-cpp-python", l.__version__, "is in", "'"$folder"'")'
