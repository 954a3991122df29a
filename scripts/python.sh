# Sets PYTHON to an interpreter with the project's packages: the caller's choice, the active
# environment's, or that of `make demo`. Sourced by the other scripts, which set ROOT.
if [ -z "${PYTHON:-}" ]; then
  for PYTHON in python3 python "$ROOT/.venv/bin/python" ""; do
    "${PYTHON:-false}" -c 'from importlib.util import find_spec as f; exit(not f("transformers"))' \
      2>/dev/null && break
  done
  if [ -z "$PYTHON" ]; then
    echo "error: no Python here has the project's packages; run 'make demo' or 'pip install -e .'" \
      "in $ROOT first, or set PYTHON to an interpreter that has them" >&2
    exit 2
  fi
fi
