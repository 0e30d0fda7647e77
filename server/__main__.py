"""The process of a `plait` command. Knows no verb: what they need takes a second to import, and a
process that is asked to end meanwhile ends."""

from __future__ import annotations

import sys

from engine.process import end_when_asked


def main() -> int:
    """Run the command line's verb; returns the process's exit code."""
    end_when_asked()
    try:
        from server import verbs

        return verbs.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
