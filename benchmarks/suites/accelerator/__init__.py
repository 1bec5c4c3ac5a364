"""The measurements on an accelerator: parity, the head and its tiles, attention, experts, sampling and updates."""
