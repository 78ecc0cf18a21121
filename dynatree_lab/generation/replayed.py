"""A generation over recorded texts (replay/): what it refuses, and its draft temperature.

require_replayable(config, method, draft, {"logprobs": 2})  # raises ReplayError
config = at_recorded_temperature(config, method, target, prompt)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dynatree import draft_temperature
from dynatree_lab.engine.passes import FULL_ATTENTION
from dynatree_lab.generation.config import GenerationConfig
from dynatree_lab.methods.eagle import EagleHead
from dynatree_lab.methods.method import Method
from dynatree_lab.replay.models import RecordedTarget
from dynatree_lab.replay.texts import ReplayError
from gpt_neox import Model


def at_recorded_temperature(
    config: GenerationConfig, method: Method, target: Model, prompt: Sequence[int]
) -> GenerationConfig:
    """Return the config whose draft temperature suits the text that a RecordedTarget continues.
    With another target, or if the config or the method has a draft temperature, it stays. Raises
    ReplayError if no text is recorded after the prompt."""
    if not isinstance(target, RecordedTarget):
        return config
    text = target.find(prompt)
    if config.sampling.draft_temperature or method.facts.draft_temperature:
        return config
    suited = draft_temperature(text.temperature)
    return replace(config, sampling=replace(config.sampling, draft_temperature=suited))


def require_replayable(
    config: GenerationConfig,
    method: Method,
    draft: Model | None = None,
    readers: Mapping[str, object] | None = None,
) -> None:
    """Raise ReplayError for what reads more of a target than the tokens of its text.

    readers: the arguments of a generation that read logits, such as process; None is none.
    """
    sampling = config.sampling
    found = [name for name, reader in (readers or {}).items() if reader is not None]
    if isinstance(draft, EagleHead):
        found.append("an EAGLE head, which reads hidden states")
    if sampling.draws_candidates:
        found.append(f"temperature {sampling.temperature} with drawn candidates")
    if config.strict:
        found.append("strict")
    if config.window != FULL_ATTENTION:
        found.append("window")
    if config.commit == "rebuild":
        found.append("rebuild")
    if method.costs == "learned":
        found.append("costs=learned, which reads times")
    if method.facts.target_top_k:
        found.append("a method with the target's best tokens off the path")
    if method.make_accept:
        found.append("a method with an acceptance of its own")
    if found:
        why = "a recorded text has only the target's tokens"
        raise ReplayError(f"a replay cannot have {', '.join(found)}, because {why}")
