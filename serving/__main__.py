"""The command `zoo` (cli/run.py)."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        # Ctrl-C may come while the packages of the commands are imported.
        from serving.cli.run import run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:  # Python 3.11's for Ctrl-C while a package defines a class
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        sys.exit(130)


if __name__ == "__main__":
    main()
