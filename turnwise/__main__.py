"""`python -m turnwise` is the command `turnwise`."""

from turnwise.cli.main import main

if __name__ == "__main__":
    main()
