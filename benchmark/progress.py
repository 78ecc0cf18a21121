"""How far a table is, and what is left: a bar on a terminal, elsewhere a line every half minute.

with Progress(n_texts) as progress:
    progress.add(1)  # one more is written
"""

import time

from tqdm import tqdm

from cli.errors import say

EVERY_S = 30.0


class Progress(tqdm):
    """A bar over a table's texts; where stderr is no terminal it is disabled, and says lines."""

    def __init__(self, n_texts: int):
        super().__init__(total=n_texts, disable=None, leave=False, unit="text")
        self.begun_at = time.monotonic()
        self.said_at = self.begun_at

    def add(self, n: int) -> None:
        """So many more texts are written."""
        self.update(n)
        now = time.monotonic()
        if self.disable:
            self.n += n
            if self.n and now - self.said_at >= EVERY_S:
                self.said_at = now
                left = (now - self.begun_at) / self.n * (self.total - self.n)
                say(f"{self.n} of {self.total} texts, {self.format_interval(left)} left")
