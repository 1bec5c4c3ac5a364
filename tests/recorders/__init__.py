"""The recorders of docs/parity.md and docs/replay.md around the newest packages: `make test-recorders`."""
