"""``python -m lampejo`` is the same as ``lampejo``."""

import sys

from lampejo.cli import main

sys.exit(main())
