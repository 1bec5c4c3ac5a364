"""Eight virtual CPU devices for every test, set before JAX starts; hypothesis draws the same examples every time."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import hypothesis

hypothesis.settings.register_profile("kljax", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("kljax")
