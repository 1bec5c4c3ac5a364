"""The parity command: replays one recorded batch of another framework and names the cause of each difference.

`python -m kljax parity DUMP` goes through the stages of an update in the order of the data: mask, log-probs, ratios,
corrections, KL, advantages, policy loss, reduction, gradient, metrics. Each stage is recomputed in float64 from the
inputs that the dump itself recorded, so that one fault is reported once. A cause is one setting of one stage; it is
named only if recomputing with it brings the residual within the rounding bound of the recorded dtype.
"""
