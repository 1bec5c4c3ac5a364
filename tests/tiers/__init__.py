"""Which tests `make test`, CI and the night run: measured, then chosen by what each costs and which lines it reaches.

`make measure-tests` runs all tests with the plugin `tests.tiers.measure`, for hours; `python -m tests.tiers FOLDER`
chooses, and writes `more.txt` and `nightly.txt`.
"""
