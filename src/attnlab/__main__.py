"""python -m attnlab: the command line."""

from attnlab.cli import main

if __name__ == "__main__":
    main()
