"""python -m npqwen: the same as the command npqwen."""

import sys

from npqwen.cli import main

sys.exit(main())
