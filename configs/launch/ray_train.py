"""Runs `python -m train` on the hosts of TPU slices with Ray Train; see kuberay.yaml, which calls it.

python configs/launch/ray_train.py --topology 2x2x4 --accelerator TPU-V5P --hosts 4 CONFIG key=value ...
"""

import argparse
import subprocess
import sys
from typing import Any

LOST_OR_STOPPED = 75, 130
"""Exit codes of a run that continues where it was saved."""


def train_on_host(config: dict[str, Any]) -> None:
    """Runs the command to its end; an error starts all hosts again."""
    import ray.train

    # A process of its own: Ray has joined the hosts in this one, and a run joins them by itself.
    code = subprocess.run([sys.executable, "-m", "train", *config["arguments"]], cwd="/kljax", check=False).returncode
    if code in LOST_OR_STOPPED or code < 0:
        raise RuntimeError(f"the run ended with exit code {code}, and continues where it was saved")
    ray.train.report({"exit_code": code})


def main() -> int:
    """Runs the hosts; returns the exit code of the run."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    parser = argparse.ArgumentParser()
    parser.add_argument("--topology", required=True)
    parser.add_argument("--accelerator", required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--storage", required=True, help="directory that all hosts see")
    options, arguments = parser.parse_known_args()
    trainer = JaxTrainer(
        train_on_host,
        train_loop_config={"arguments": [*arguments, "--resume-or-start", "--join-timeout", "1800"]},
        scaling_config=ScalingConfig(
            use_tpu=True, num_workers=options.hosts, topology=options.topology, accelerator_type=options.accelerator
        ),
        run_config=RunConfig(name="kljax", storage_path=options.storage, failure_config=FailureConfig(max_failures=10)),
    )
    return int((trainer.fit().metrics or {}).get("exit_code", 1))


if __name__ == "__main__":
    sys.exit(main())
