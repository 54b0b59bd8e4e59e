#!/usr/bin/env bash
# Check the engine on a GPU: kernels, tokens, speed. At most 9 minutes; nothing is downloaded.
#
#     scripts/gpu_check.sh [--device cuda|cpu] [--tiny] [--only a,b] [--out FILE.json] [--seconds N]
#
# Models get random weights from a seed, so none is needed. docs/engine.md ("On a GPU") says what each part checks.
#
# With `pip install 'pointsman[server,sim]'` nothing is missing. On a machine that has only torch, transformers, numba,
# typer, rich, safetensors, tokenizers, scipy, uvloop, prometheus_client and pyyaml, these wheels belong in a folder
# `.whl` beside this script or at the root of the checkout, for part f (the server) alone:
#
#     fastapi starlette pydantic pydantic_core annotated_types typing_inspection annotated_doc opentelemetry_api
#     uvicorn httptools h11
#
# For a machine with Python 3.12, on one with a network (pydantic_core in the version that pydantic asks for):
#
#     pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#         --platform manylinux2014_x86_64 -c constraints.txt -d .whl fastapi starlette ...
#
# All other parts run without them. xgrammar, gguf and httpx2 are not needed: nothing here compiles grammars, reads GGUF
# files or chats.
set -euo pipefail
scripts=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$scripts")
python=${PYTHON:-python3}
path=$root:$root/scripts:$root/benchmarks
for wheels in "$scripts/.whl" "$root/.whl"; do
    if compgen -G "$wheels/*.whl" > /dev/null; then
        site=$(mktemp -d)
        trap 'rm -rf "$site"' EXIT
        "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
        path=$path:$site
        break
    fi
done
PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} "$python" -m gpu_check "$@"
