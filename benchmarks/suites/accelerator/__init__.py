"""The measurements on an accelerator: parity, the head, attention, sampling and updates."""
