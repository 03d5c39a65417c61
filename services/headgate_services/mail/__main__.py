"""`python -m headgate_services.mail`."""

from __future__ import annotations

import argparse
import sys

from headgate_services.mail import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m headgate_services.mail", description="Run the mail service."
    )
    parser.add_argument("--host", help="where to listen (default: HOST, or 127.0.0.1)")
    parser.add_argument("--port", type=int, help="which port; 0 for any free one (default: PORT, or 8000)")
    parser.add_argument(
        "--workers", type=int, default=1, help="how many processes share the work (default: 1)"
    )
    options = parser.parse_args()
    sys.exit(main(options.host, options.port, options.workers))
