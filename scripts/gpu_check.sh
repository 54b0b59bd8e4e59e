#!/usr/bin/env bash
# Check the engine on a GPU: kernels, tokens, speed. At most 9 minutes; nothing is downloaded.
#
#     scripts/gpu_check.sh [--device cuda|cpu] [--tiny] [--only a,b] [--out FILE.json] [--seconds N]
#
# Models have random weights from a seed, so no model is needed. docs/compatibility.md ("GPUs") describes the parts.
#
# `pip install 'pointsman[server,sim]'` installs all that is needed. On a machine that has only torch, transformers,
# numba, typer, rich, safetensors, tokenizers, scipy, uvloop, prometheus_client and pyyaml, put these wheels into a
# folder `.whl` beside this script or at the root of the checkout. Only part f (the server) needs them:
#
#     fastapi starlette pydantic pydantic_core annotated_types typing_inspection annotated_doc opentelemetry_api
#     uvicorn httptools h11
#
# To download them for a machine with Python 3.12 (pydantic_core in the version that pydantic requires):
#
#     pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#         --platform manylinux2014_x86_64 -c constraints.txt -d .whl fastapi starlette ...
#
# xgrammar, gguf and httpx2 are not needed, because no part compiles grammars, reads GGUF files or chats.
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
