"""A worker's process: `python -m engine CONFIG_JSON`. Asked to end, it ends from its first moment
on; the worker itself takes seconds to import."""

from __future__ import annotations

from engine.process import end_when_asked, leave


def main() -> int:
    end_when_asked(0)
    from engine import worker

    return worker.main()


if __name__ == "__main__":
    leave(main())
