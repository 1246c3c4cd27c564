"""The program `turnwise`, and `python -m turnwise`."""

import os
import signal


def main() -> None:
    """Runs the command. Ctrl-C during the first imports ends the process without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    from turnwise.cli.main import main as command

    signal.signal(signal.SIGINT, before)
    command()


if __name__ == "__main__":
    main()
