"""How a job ends when something is wrong: one line on stderr and a documented exit code, no traceback for a user's mistake.

0    finished, or stopped on purpose (--max_hours): start again to go on
1    the training itself failed (a loss that is not a number, a lost node)
2    asked for something impossible; the line says what was given, what is allowed and what to do
130  interrupted with Ctrl-C, after saving
143  stopped by the platform (SIGTERM), after saving
"""

import sys


class UserError(ValueError):
    """What was given, what is allowed, what to do: in one line."""

    exit_code = 2


class TrainingFailed(RuntimeError):
    """The run cannot go on, through no mistake in the way it was started."""

    exit_code = 1


def one_line(text):
    """`text` with line ends and control characters made visible: a file name must not be able to forge a log line."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in str(text))


def run_job(main):
    """Call a job's `main` and leave with the exit code above."""
    try:
        main()
    except (UserError, TrainingFailed) as error:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our output has gone (`... | head`); there is nobody to tell
        sys.stderr.close()
        sys.exit(1)
