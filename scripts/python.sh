# Sets PYTHON to the interpreter that has the project's packages: the one that the caller names,
# the active environment's, or that of `make demo`. Read by the other scripts; ROOT is set.
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
