"""`python -m accumodel --check`: are the weights right on this machine?"""

import sys

from accumodel._check import run

if __name__ == "__main__":
    sys.exit(run())
