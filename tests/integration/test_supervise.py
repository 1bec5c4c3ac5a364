"""`--supervise` on the real command: a mistake is final. That a loss is continued is in test_resume.py."""

from tests.integration.command import run_here


def test_config_mistake_is_not_restarted(tmp_path, capfd):
    done = run_here("configs/smoke.yaml", f"output={tmp_path}", "steps=-1", "--supervise")
    assert done.returncode == 2
    errors = capfd.readouterr().err
    assert errors.count("steps: got -1") == 1
    assert "restart" not in errors
