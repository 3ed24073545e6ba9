#!/usr/bin/env bash
# Train a small masked diffusion model on text, validate it, and watch it write. `make quickstart` runs this.
#   quickstart.sh RUN_FOLDER [TEXT] [RESUME]
# TEXT: a text file or folder; empty = the sources of Python's standard library. RESUME: non-empty = go on.
set -euo pipefail
folder=${1:-runs} text=${2:-} resume=${3:-}

if [ -z "$resume" ] && [ -e "$folder/mdlm_tiny/checkpoints" ]; then
  echo "$folder/mdlm_tiny exists: RESUME=1 goes on with it, RUN_FOLDER=... starts another" >&2
  exit 2
fi
prompt=${text:+The }
prompt=${prompt:-import os}
recipe="mdlm_tiny(dir='$folder'${text:+, path='$text'})"

echo "$ nemo-dllm pretrain --factory \"$recipe\""
nemo-dllm pretrain --factory "$recipe"
echo
echo "$ nemo-dllm generate $folder/mdlm_tiny --prompt '$prompt' ..."
nemo-dllm generate "$folder/mdlm_tiny" --prompt "$prompt" --max-new-tokens 64 \
  --temperature 0.6 --remasking random --seed 1 --watch
