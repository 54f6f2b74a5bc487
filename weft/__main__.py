"""Entry point of ``weft``. It imports nothing before Ctrl-C has an answer: what a command imports takes a while."""


def main() -> None:
    """Run the command line; Ctrl-C while it is being imported, or while it ends, costs a line and no traceback."""
    import os

    try:
        if "WEFT_LAUNCHED" in os.environ:
            import signal

            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher has held it back so far

        from weft.cli import main as run

        run()
    except KeyboardInterrupt:
        import sys

        if os.environ.get("RANK", "0") == "0":  # of several ranks, the first says it
            print("weft: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
