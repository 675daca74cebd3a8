"""A deadline for commands that may run only for a while: preemptible machines and short queue limits."""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

GRACE_S = 20.0  # before the deadline: running jobs write a checkpoint and stop
LEAST_S = 20.0  # a job that would have less time is not started, unless it says otherwise
UNITS = {"h": 3600, "m": 60, "s": 1}


class OutOfTimeError(Exception):
    """The deadline is near: running jobs stopped at a checkpoint. The message says what is left."""

    failed: Mapping[str, str] = {}  # the jobs that failed before, by name


@contextmanager
def stop_at_deadline(command: str) -> Iterator[None]:
    """Near the deadline, print what is left and the command that continues, and exit with status 0."""
    try:
        yield
    except OutOfTimeError as left:
        need = f"a run starts only with {GRACE_S + LEAST_S:.0f} s or more before the deadline"
        print(f"the deadline is near: {left} ({need}); to continue: {command}")
        raise SystemExit(0) from None


@dataclass(frozen=True)
class Deadline:
    """A time after which nothing runs, on the clock of time.monotonic."""

    end: float

    @classmethod
    def parse(cls, text: str) -> "Deadline":
        """Read a duration (9m, 1h30m, 45s) or a clock time (14:30: the next one)."""
        if match := re.fullmatch(r"(\d{1,2}):(\d{2})", text):
            hour, minute = map(int, match.groups())
            if hour < 24 and minute < 60:
                now = datetime.now()
                then = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
                seconds = (then - now + timedelta(days=0 if then > now else 1)).total_seconds()
                return cls(time.monotonic() + seconds)
        if text and (match := re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)):
            seconds = sum(int(count or 0) * size for count, size in zip(match.groups(), UNITS.values(), strict=True))
            if seconds > 0:
                return cls(time.monotonic() + seconds)
        raise ValueError(f"--until {text}: expected a duration such as 9m or 1h30m, or a clock time such as 14:30")

    @classmethod
    def parse_optional(cls, text: str | None) -> "Deadline | None":
        return None if text is None else cls.parse(text)

    @property
    def is_near(self) -> bool:
        """Whether running jobs must stop now."""
        return time.monotonic() > self.end - GRACE_S

    def leaves(self, seconds: float) -> bool:
        """Return whether a job that needs this many seconds can start."""
        return time.monotonic() + seconds < self.end - GRACE_S
