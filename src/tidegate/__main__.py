"""`python -m tidegate` is the command `tidegate`."""

import sys

from tidegate._cli import main

if __name__ == "__main__":
    sys.exit(main())
