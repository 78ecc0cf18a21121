"""A text that is written by several calls. What the models have run is not run again.

session = Session(load_pair())
print(session.write("The ship sailed at dawn", max_new_tokens=32).text)
print(session.write(" The captain said", "dyspec N=16", max_new_tokens=32).text)
"""

from collections.abc import Iterable
from dataclasses import replace

from dynatree_lab.cli.models import Pair
from dynatree_lab.cli.request import Request, make_request
from dynatree_lab.cli.result import Result, command
from dynatree_lab.cli.tokens import StopTexts, TextStream
from dynatree_lab.engine.generation_config import GenerationConfig
from dynatree_lab.engine.kept import KeptCache


class Session:
    """The ids of a text so far, and copies of the caches that have run them."""

    def __init__(self, pair: Pair):
        self.pair = pair
        self.ids: list[int] = []  # may be replaced; what has not changed is not run again
        self.kept = KeptCache(), KeptCache()  # of the target and of the draft

    def write(
        self,
        text: str,
        config: GenerationConfig | str = "dynatree",
        max_new_tokens: int = 128,
        eos_ids: Iterable[int] | None = None,
        stop: str | Iterable[str] = (),
        logprobs: int | None = None,
        **sampling: float,
    ) -> Result:
        """Append a text, which may be empty after the first call, and continue it. The arguments
        are those of write_text, and so are the errors.

        The result is that of a fresh run over all ids, whatever was written before, and with
        whatever method. After a stop text, the session goes on from the token that completed it.
        """
        given = config, max_new_tokens, eos_ids, stop, sampling
        request = make_request(self.pair, text, *given, before=self.ids)
        request = replace(request, kept=self.kept, logprobs=logprobs, is_recorded=True)
        result = Result(request, [] if self.ids else command(text, request)).write_all()
        self.ids = request.prompt + ids_until_stop(result, request)
        return result


def ids_until_stop(result: Result, request: Request) -> list[int]:
    """Return the ids of a result up to the one that completed a stop text, if one did. The ids
    after it depend on the trees."""
    stream, stops = TextStream(request.pair.tokenizer), StopTexts(request.stop)
    for n, token in enumerate(result.ids, start=1):
        stops.push(stream.push([token]))
        if stops.has_ended:
            return result.ids[:n]
    return result.ids
