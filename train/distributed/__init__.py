"""The door to many processes: their start, rows of global arrays, and agreement on values and errors.

Every process runs the same program. Arrays live on the devices of all processes; small values on the host travel
through the coordination service of JAX. With one process every function is a no-op or a plain copy. Nothing else in the
trainer asks how many processes there are, or which devices belong to this one.
"""
