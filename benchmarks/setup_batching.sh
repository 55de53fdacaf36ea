#!/usr/bin/env bash
# Install the peers of benchmarks/request_batching.py, each into a virtual environment of its own under .bench/.
# Usage: benchmarks/setup_batching.sh [PEER ...]    (default all; PYTHON chooses the interpreter, 3.11 or 3.12)
set -euo pipefail
cd "$(dirname "$0")/.."

make_environment() { # NAME INTERPRETER REQUIREMENT...
    local folder=.bench/$1 interpreter=$2
    shift 2
    "$interpreter" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    echo "$* is in $folder"
}

# BentoML asks for the newest certificates (certifi), which not every package index has yet; it makes no connection
# here. So its requirements are installed from its own metadata, with any version of that one.
make_bentoml() {
    local folder=.bench/bentoml
    make_environment bentoml "$python" packaging
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps bentoml==1.4.40
    "$folder/bin/python" - >"$folder/requirements.txt" <<'PYTHON'
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("bentoml") or ():
    requirement = Requirement(line)
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print("certifi" if requirement.name == "certifi" else requirement)
PYTHON
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -r "$folder/requirements.txt"
    echo "bentoml==1.4.40 is in $folder"
}

python=${PYTHON:-python3}
if [ $# -eq 0 ]; then
    set -- batched async-batcher bentoml fastapi litserve mosec pytriton ray260 ray247
fi
for peer in "$@"; do
    case $peer in
        batched) make_environment batched "$python" batched==0.1.5 ;;
        async-batcher) make_environment async-batcher "$python" async-batcher==0.2.2 ;;
        bentoml) make_bentoml ;;
        # What batchwright's own server in the HTTP tier stands behind.
        fastapi) make_environment fastapi "$python" fastapi==0.163.2 "uvicorn[standard]==0.54.0" ;;
        litserve) make_environment litserve "$python" litserve==0.2.19 ;;
        mosec) make_environment mosec "$python" mosec==0.9.8 ;;
        # Its Triton embeds Python 3.11 as Debian builds it; other builds lack the shared library.
        pytriton) make_environment pytriton /usr/bin/python3.11 nvidia-pytriton==0.7.0 ;;
        ray260) make_environment ray260 "$python" "ray[serve]==2.60.0" ;;
        ray247) make_environment ray247 "$python" "ray[serve]==2.47.1" ;;
        *)
            echo "unknown peer $peer: see the cases in $0" >&2
            exit 2
            ;;
    esac
done
