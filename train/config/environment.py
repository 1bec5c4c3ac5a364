"""The environment of episodes: the class, and the limits of turns, time and failures."""

from typing import Annotated, Literal

from pydantic import Field

from train.config.algorithms import Arguments, FunctionName, Table
from train.config.types import Count, Fraction, Positive, Section, Size, Text

Turns = Annotated[int, Field(ge=1, le=1000)]


class EnvironmentSection(Section):
    """An environment, in which a completion is an episode of several turns."""

    name: FunctionName
    """Your class, `module:Name` or `path/to/file.py:Name`; an object for each episode, in a worker process."""
    arguments: Arguments = Table()
    """Its keyword arguments."""
    max_turns: Turns = 8
    """Most turns of an episode; data.max_completion_length limits its tokens, observations included."""
    turn_tokens: Count | None = None
    """Most tokens of a turn; null: what is left of the episode."""
    history: Literal["keep", "template"] = "keep"
    """Where the chat template drops parts of earlier replies, as thinking: `keep` them, or fork as `template` says."""
    renderer: Text | None = None
    """A family of the package renderers, such as qwen3, that writes and reads turns; null: the chat template does."""
    step_seconds: Positive = 60.0
    """Longest time of one call of the environment; an episode beyond it has failed, and is not trained on."""
    turn_seconds: Positive | None = None
    """Longest time of a turn and of its call; likewise. null: none."""
    episode_seconds: Positive | None = None
    """Longest time of an episode, its turns and its calls; likewise. null: none."""
    processes: Size = 1
    """Worker processes; an episode stays in its process."""
    rows: Size | None = None
    """Episodes whose KV cache stays between turns; null: all of a step."""
    max_failures: Fraction = 0.1
    """Share of the episodes of a step that may fail before the run stops; it stops if all do."""
