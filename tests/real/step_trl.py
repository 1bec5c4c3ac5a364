"""Steps of the recipe of `make real` by TRL, for tests/real/step.py; needs torch, transformers, peft and trl."""

import queue
import tempfile
import threading
from typing import Any

import torch
import transformers
import trl

from benchmarks.harness.measure import Clock, resident
from tests.real.trl_update_side import make_trainer


class Gate(transformers.TrainerCallback):
    """Lets the trainer make a step when it is asked to, and times it."""

    def __init__(self, trainer: trl.GRPOTrainer) -> None:
        self.trainer = trainer
        self.asked: queue.Queue[None] = queue.Queue()
        self.done: queue.Queue[Any] = queue.Queue()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.asked.get()
        self.clock = Clock()
        self.timed = self.clock.part("step")
        self.timed.__enter__()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.timed.__exit__(None, None, None)
        # The trainer clears its metrics when it logs them, which comes next.
        length = self.trainer._metrics["train"]["completions/mean_length"][-1]
        self.done.put({"seconds": self.clock.parts["step"], "length": length})


class TrlSteps:
    """A trainer in a thread of its own."""

    def __init__(self, threads: int, micro_batches: int, **options: Any) -> None:
        torch.set_num_threads(threads)
        output = tempfile.mkdtemp()
        self.trainer = make_trainer(output_dir=output, gradient_accumulation_steps=micro_batches, **options)
        self.gate = Gate(self.trainer)
        self.trainer.add_callback(self.gate)
        threading.Thread(target=self._train, daemon=True).start()

    def _train(self) -> None:
        try:
            self.trainer.train()
        except Exception as error:
            self.gate.done.put(error)

    def step(self) -> dict[str, Any]:
        """Makes a step; returns its wall and CPU seconds, and the mean length of the replies."""
        self.gate.asked.put(None)
        done = self.gate.done.get()
        if isinstance(done, Exception):
            raise done
        return dict(done)

    def peak(self) -> int:
        """Returns the largest resident set of this process so far, in bytes."""
        return resident("VmHWM")

    def versions(self) -> dict[str, str]:
        """Returns the versions of the libraries."""
        return {"torch": torch.__version__, "trl": trl.__version__, "transformers": transformers.__version__}


def load(**options: Any) -> TrlSteps:
    """Makes the contender."""
    return TrlSteps(**options)
