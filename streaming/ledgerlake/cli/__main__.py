"""``python -m ledgerlake.cli`` is the command ``ledgerlake``."""

import sys

from ledgerlake.cli import main

sys.exit(main())
