#!/usr/bin/env bash
# Test the Cloudflare adapter against a real workerd; needs Node 20 or later. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
make setup
(cd tests/cloudflare && npm install --no-audit --no-fund --no-package-lock --loglevel=error)
.venv/bin/pytest -q tests/cloudflare/check_workerd.py "$@"
