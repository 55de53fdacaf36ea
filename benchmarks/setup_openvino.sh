#!/usr/bin/env bash
# Install OpenVINO GenAI into a virtual environment of its own, .bench/openvino, where benchmarks/engine.py finds it.
# PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=.bench/openvino

"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check openvino==2026.4.0 \
  openvino-genai==2026.4.0.0 nncf==3.4.0 numpy
"$folder/bin/python" -c 'import openvino_genai as g; print("OpenVINO GenAI", g.__version__, "is in", "'"$folder"'")'
