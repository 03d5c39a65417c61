"""`python -m headgate_server.cli`, where the `headgate` script is not on the path."""

import sys

from headgate_server.cli import main

sys.exit(main())
