"""`python -m headgate.cli`, where the `headgate` script is not on the path."""

import sys

from headgate.cli import main

sys.exit(main())
