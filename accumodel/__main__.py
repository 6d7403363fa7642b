"""`python -m accumodel --check`: are the weights right on this machine?"""

from accumodel._check import main

if __name__ == "__main__":
    raise SystemExit(main())
