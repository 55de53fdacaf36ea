#!/usr/bin/env bash
# Install sentence-transformers and infinity-emb into virtual environments of their own, where benchmarks/embeddings.py
# finds them. Usage: benchmarks/setup_embeddings.sh [FOLDER]    (default .bench; PYTHON chooses the interpreter)
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.bench}

install() {
  "${PYTHON:-python3}" -m venv "$1"
  # torch by itself and first: an open range would pull packages for CUDA.
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 "${@:2}"
}

install "$folder/embed-st" sentence-transformers==6.2.0
# Its BetterTransformer, which computes no padding, needs the last optimum that has one, and a transformers of that time.
install "$folder/embed-infinity" "infinity-emb[torch]==0.0.78" optimum==1.24.0 transformers==4.48.3 \
  sentence-transformers==3.4.1
echo "sentence-transformers and infinity-emb are in $folder/embed-st and $folder/embed-infinity"
