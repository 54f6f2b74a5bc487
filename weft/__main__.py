"""Entry point of ``weft``. It imports nothing before signals have an answer: what a command imports takes a while."""


def main() -> None:
    """Run the command line; Ctrl-C or SIGTERM while it is being imported, or while it ends, costs a line at most."""
    import os

    try:
        import signal

        received: list[int] = []

        def stop(number: int, frame: object) -> None:
            received.append(number)
            if len(received) == 1:  # others repeat it
                raise KeyboardInterrupt

        # Also Ctrl-C that was ignored where this process was started: see weft.train.signals.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        if "WEFT_LAUNCHED" in os.environ:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher has held it back so far

        from weft.cli import main as run

        run()
    except KeyboardInterrupt:
        import sys

        if os.environ.get("RANK", "0") == "0" and "WEFT_LAUNCHED" not in os.environ:  # of several ranks, the first
            print("weft: interrupted", file=sys.stderr)
        sys.exit(128 + (*received, 2)[0])


if __name__ == "__main__":
    main()
