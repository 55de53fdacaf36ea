#!/usr/bin/env bash
# Install the peers of benchmarks/providers.py, each into a virtual environment of its own under .bench/.
# Usage: benchmarks/setup_providers.sh [PEER ...]    (default all; PYTHON chooses the interpreter)
set -euo pipefail
cd "$(dirname "$0")/.."

make_environment() { # NAME REQUIREMENT...
    local folder=.bench/$1
    shift
    "${PYTHON:-python3}" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    echo "$* is in $folder"
}

if [ $# -eq 0 ]; then
    set -- litellm async-batch-llm saturate plain
fi
for peer in "$@"; do
    case $peer in
        litellm) make_environment litellm litellm==1.110.2 ;;
        async-batch-llm) make_environment async-batch-llm "async-batch-llm[openai]==0.28.0" openai==3.57.0 ;;
        saturate) make_environment saturate saturate==0.2.0 ;;
        # The semaphore with tenacity, and the port of the cookbook's processor.
        plain) make_environment plain openai==3.57.0 tenacity==9.2.1 aiohttp==3.14.5 ;;
        *)
            echo "unknown peer $peer: see the cases in $0" >&2
            exit 2
            ;;
    esac
done
