#!/usr/bin/env bash
# Test the dashboard in a real browser; needs Chromium or Chrome. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
make setup
.venv/bin/python tools/install_extra.py browser
.venv/bin/pytest -q tests/browser/check_*.py "$@"
