"""The trainer: config, mesh, model, rollout, objective, step and loop. Run it as `python -m train CONFIG`."""
