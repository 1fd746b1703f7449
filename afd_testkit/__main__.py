"""``python -m afd_testkit``: the command ``afd-testkit``."""

import sys

from afd_testkit.cli import main

sys.exit(main())
