#!/usr/bin/env bash
# Test the adapters for models and agents with the real packages, in a separate environment. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv-adapters
if [[ ! -e $venv/.ready || constraints.txt -nt $venv/.ready || pyproject.toml -nt $venv/.ready ]]; then
  "${PYTHON:-python3}" -m venv "$venv"
  HEADGATE_PURE=1 "$venv/bin/pip" install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[adapters]'
  touch "$venv/.ready"
fi
# The packages warn about each other; only our own warnings are errors.
"$venv/bin/python" -m pytest -q -p no:cacheprovider -W default -W error:::headgate tests/adapters/check_*.py "$@"
