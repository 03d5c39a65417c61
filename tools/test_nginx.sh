#!/usr/bin/env bash
# Test the gate with a real nginx, which must be installed. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
make setup
.venv/bin/pytest -q tests/proxies/check_nginx.py "$@"
