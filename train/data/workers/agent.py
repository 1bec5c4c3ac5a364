"""Worker module: runs episodes of an agent program, which its argument names as JSON.

A question is `{"episodes": [{"row", "api_key"}], "base_url", "model", "concurrency", "seconds"}`; the answer has an
entry for each episode: its `rewards`, None where the task scores it, or a `failure`, its name and text.
"""

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from train.config.errors import UserError
from train.config.user_functions import failure, find_function
from train.data.reward_call import WrongRewardError, named_rewards
from train.data.workers.serve import serve


class _Agent:
    """The agent program of this process, imported by the first question."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._name = name
        self._arguments = arguments
        self._play: Callable[..., Any] | None = None
        # One loop for all steps, which the connections of a client belong to.
        self._loop = asyncio.new_event_loop()

    def __call__(self, question: Any) -> Any:
        try:
            if self._play is None:
                self._play = find_function("rollout.source.agent", self._name)
        except UserError as error:
            return {"error": str(error)}
        if question is None:
            return {}
        return self._loop.run_until_complete(self._play_all(question))

    async def _play_all(self, question: Mapping[str, Any]) -> list[dict[str, Any]]:
        play = self._play
        assert play is not None
        room = asyncio.Semaphore(question["concurrency"])
        # A thread that is over its time goes on: the others need not wait for it.
        threads = ThreadPoolExecutor(max(1, len(question["episodes"])))
        self._loop.set_default_executor(threads)

        async def one(episode: Mapping[str, Any]) -> dict[str, Any]:
            given = {**episode, "base_url": question["base_url"], "model": question["model"], **self._arguments}
            async with room:
                limit = asyncio.timeout(question["seconds"])
                try:
                    async with limit:
                        if inspect.iscoroutinefunction(play):
                            returned = await play(**given)
                        else:
                            returned = await asyncio.to_thread(play, **given)
                    rewards = dict(returned) if isinstance(returned, Mapping) else returned
                    return {"rewards": None if rewards is None else named_rewards(rewards)}
                except WrongRewardError as error:
                    return {"failure": ("exception", f"{self._name} {error}")}
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # also SystemExit, which would end the run without a word
                    if isinstance(error, TimeoutError) and limit.expired():
                        text = f"not over within rollout.source.episode_seconds = {question['seconds']:g}"
                        return {"failure": ("episode_seconds", text)}
                    return {"failure": ("exception", failure(error))}

        played = await asyncio.gather(*map(one, question["episodes"]))
        threads.shutdown(wait=False)
        return played


if __name__ == "__main__":
    _chosen = json.loads(sys.argv[1])
    serve(_Agent(_chosen["name"], _chosen["arguments"]))
