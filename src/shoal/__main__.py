"""`python -m shoal`, which is also what torchrun starts."""

import sys

from shoal.cli import main

sys.exit(main())
