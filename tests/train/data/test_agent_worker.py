"""The worker process of agent programs: episodes share threads, and none takes another's time."""

from train.data.workers.agent import _Agent

SOURCE = """
import threading
OVER = threading.Event()
def play(row, base_url, model, api_key):
    if row == "hangs":
        OVER.wait(20.0)
    return {"reward": 1.0}
"""


def test_program_that_hangs_takes_no_thread_of_others(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    agent = _Agent(f"{file}:play", {})
    assert agent(None) == {}
    episodes = [{"row": row, "api_key": "k"} for row in ("hangs", "first", "second")]
    question = {"episodes": episodes, "base_url": "http://a", "model": "m", "concurrency": 1, "seconds": 0.3}
    played = agent(question)
    agent._play.__globals__["OVER"].set()
    agent._loop.close()
    late = ("episode_seconds", "not over within rollout.source.episode_seconds = 0.3")
    assert played == [{"failure": late}, {"rewards": {"reward": 1.0}}, {"rewards": {"reward": 1.0}}]
