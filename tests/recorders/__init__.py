"""The recorders of docs/parity.md around the newest packages: `make test-recorders`."""
