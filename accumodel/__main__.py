"""`python -m accumodel --check`: are the weights right on this machine?"""

import sys

from accumodel._check import main

if __name__ == "__main__":
    sys.exit(main())
