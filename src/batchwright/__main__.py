"""Entry point of `python -m batchwright`, which is the command `batchwright`."""

from batchwright.cli.main import main

if __name__ == "__main__":
    main()
