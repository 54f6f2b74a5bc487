"""Entry point of ``weft``. Signals are handled before anything is imported, as imports of commands take a while."""

import contextlib
import os
import sys


def main() -> None:
    """Run the command line ``weft``.

    Ctrl-C or SIGTERM while it starts or ends prints at most one line, and no traceback.
    """
    received: list[int] = []
    try:
        import signal

        def stop(number: int, frame: object) -> None:
            received.append(number)
            if len(received) == 1:  # others repeat it
                raise KeyboardInterrupt

        # Also Ctrl-C that was ignored where this process was started: see weft.run.signals.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        if "WEFT_LAUNCHED" in os.environ:
            # the launcher has held it back so far
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

        from weft.cli import run_command_line
        from weft.run.signals import requests

        requests.program = main
        run_command_line()
    except KeyboardInterrupt:
        # of several ranks, the first
        if os.environ.get("RANK", "0") == "0" and "WEFT_LAUNCHED" not in os.environ:
            print("weft: interrupted", file=sys.stderr)
        _leave(128 + (*received, 2)[0])
    except BrokenPipeError as error:
        from weft.run.failure import nobody_reads, report_failure

        if nobody_reads():
            _leave(1)
        sys.exit(report_failure(error))
    except SystemExit as ended:
        if requests.asked:
            _leave(ended.code if isinstance(ended.code, int) else 1)
        raise


def _leave(code: int) -> None:
    """End at once, because a repeated signal while the interpreter ends would change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
