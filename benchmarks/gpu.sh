#!/usr/bin/env bash
# Correctness and speed of the curvature engine on one CUDA device. Needs PyTorch >= 2.9 and NumPy; nothing is installed.
#   bash benchmarks/gpu.sh [RESULT.json] [MINUTES]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
exec "${PYTHON:-python3}" "$root/benchmarks/gpu.py" --json "${1:-gpu.json}" --minutes "${2:-8}"
