#!/bin/sh
# Installs the torch of a requirements file.
#   torch.sh PYTHON BACKEND FILE    BACKEND: cpu, or auto (what fits this machine's devices), or pip (what pip finds)
# TORCH_INDEX_URL names the index that has it, for pip. Without it, and where pip was told of no index, uv takes it from
# where builds of the backend are: on x86 Linux pip alone may find a build for CUDA, several GB larger.
set -eu
python=$1 backend=$2 file=$3

if [ -n "${TORCH_INDEX_URL-}" ]; then
  exec "$python" -m pip install --index-url "$TORCH_INDEX_URL" --requirement "$file"
fi
if [ "$backend" != pip ] && ! "$python" -m pip config list | grep -q 'index-url'; then
  "$python" -m uv pip install --python "$python" --torch-backend="$backend" --requirement "$file" && exit
  echo "torch: uv reaches no builds for $backend; now as pip finds it, which may be several GB. TORCH_INDEX_URL names an index of yours" >&2
fi
exec "$python" -m pip install --requirement "$file"
