"""What the rewards of the task weigh, and what length costs."""

from train.config.types import CountOrZero, NonNegative, Positive, Section, Weights


class Rewards(Section):
    weights: Weights | None = None
    """Weight of each reward by its name; those not named weigh nothing. null: the task's own total."""
    length_penalty: NonNegative = 0.0
    """Subtracted in full from a completion of data.max_completion_length tokens, in proportion from shorter ones."""
    overlong_buffer: CountOrZero = 0
    """Tokens before data.max_completion_length over which the soft punishment of DAPO grows from 0; 0: none."""
    overlong_coef: Positive = 1.0
    """Soft punishment of a completion of the full length."""
