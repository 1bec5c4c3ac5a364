"""What would go wrong with the examples of a run, found on one of them before the run has a directory."""

import numpy as np

from train.data.prompts import check_solutions
from train.data.tasks.rewards import compose, judge
from train.run.setting import Setting


def check_examples(setting: Setting, *, imitates: bool) -> None:
    """Judges an empty completion, which any policy may write, and looks at the solutions if they are imitated.

    Args:
      imitates: whether the warm start of this run is still to come.

    Raises:
      UserError: the reward function fails or returns no numbers, a reward is weighed that is not there, an example has
        no solution, or no solution fits.
    """
    config, examples = setting.config, setting.prompts.examples
    scores = judge(setting.task, examples[:1], [""], np.array([True]))
    compose(config.rewards, scores, np.array([1]), longest=config.data.max_completion_length)
    if imitates and config.warm_start.trains():
        check_solutions(examples, setting.tokenizer, config.data.max_completion_length)
