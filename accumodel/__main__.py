"""`python -m accumodel`: the demonstration. `--check`: is it right here?"""

import sys

if "--check" in sys.argv[1:]:
    from accumodel._check import run as main
else:
    from accumodel._demonstration import main

if __name__ == "__main__":
    sys.exit(main())
