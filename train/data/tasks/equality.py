"""Mathematical equality of answers, by math-verify in worker processes that can be killed."""

import functools
import logging

from train.config.errors import UserError
from train.data.workers.process import NoAnswer, NotStarted, WorkerPool

_LOG = logging.getLogger(__name__)

SECONDS = 8.0
WORKERS = 2


class Judge:
    """A pool of worker processes, started on first use; safe to call from several threads.

    Attributes:
      workers: maximum number of concurrent questions.
      gave_up: number of answers that took too long and count as wrong.
    """

    def __init__(self, workers: int = WORKERS, seconds: float = SECONDS) -> None:
        """Limits the pool to `workers` processes, and each answer to `seconds` of CPU time; a longer one is wrong."""
        self.workers = workers
        self._seconds = seconds
        self._pool = WorkerPool("equality", workers=workers)
        self.gave_up = 0

    def equal(self, gold: str, text: str) -> bool:
        """Checks whether the last mathematical expression of `text` (a box first) is equal to `gold`.

        Args:
          gold: LaTeX or plain text, without dollar signs or a box.
          text: the completion.

        Raises:
          UserError: math-verify does not start.
        """
        try:
            return bool(self._pool.ask({"gold": gold, "text": text}, cpu_seconds=self._seconds))
        except NoAnswer as error:
            self.gave_up += 1
            _LOG.warning("math-verify gave %s for an answer, which counts as wrong: %r", error, text[-80:])
            return False
        except NotStarted as error:
            raise UserError(f"data.judge: math-verify does not start; is it installed? ({error})") from None

    def close(self) -> None:
        """Ends the processes; the next question starts them again."""
        self._pool.close()


@functools.cache
def shared_judge() -> Judge:
    """Returns the pool of workers that all tasks of this process share."""
    return Judge()
