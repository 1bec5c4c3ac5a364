"""Other masks: of the record, of the loss, of the KL."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kljax.tools.parity.causes import Cause, make, rare
from kljax.tools.parity.positions import apply_rule
from kljax.tools.parity.recipe import Kl, MaskRule
from kljax.tools.parity.replay import Replay


def mask_causes(replay: Replay, stage: str, title: str) -> Iterator[Cause]:
    """Yields the faults of a mask that change it; of several that give the same mask, the first.

    An empty mask is left out: nothing would be compared, and every number explained.
    """
    options: list[tuple[str, str, dict[str, Any]]] = [
        ("shifted right by one", "is shifted by one position to the right", {"shift": 1}),
        ("shifted left by one", "is shifted by one position to the left", {"shift": -1}),
        ("prompt tokens", "has the prompt's tokens in it", {"prompt": "all"}),
        ("prompt tokens but the first", "has the prompt's tokens in it, but the first", {"prompt": "predicted"}),
        ("pad tokens", "has padding in it", {"pad": True}),
        ("first token left out", "leaves out the first token of each row", {"first": False}),
        ("last row left out", "leaves out the last row", {"final": False}),
        ("padding on the left", "has padding on the left in it", {"left": True}),
        ("one token more", "has the token behind each row in it", {"extra": 1}),
        ("one token before", "has the token before each completion in it", {"before": 1}),
        ("tokens within rows left out", "leaves out tokens within rows", {"inside": False}),
        ("after the longest prompt", "starts behind the longest prompt of the batch", {"longest": True}),
    ]
    if replay.layout.ends_known:
        text = "leaves out the end-of-sequence token of each row"
        options.append(("end of sequence left out", text, {"last": "cut"}))
        options.append(("last token left out", "leaves out the last token of each row", {"last": "none"}))
    else:
        options.append(("end of sequence left out", "leaves out the last token of each row", {"last": "none"}))
    options += [
        ("rows cut at the limit left out", "leaves out the rows that are cut at the limit", {"cut": False}),
        ("prompt and pad tokens", "has the prompt's tokens and padding in it", {"prompt": "all", "pad": True}),
        ("prompt and padding on the left", "has all before the completion in it", {"prompt": "all", "left": True}),
        ("all tokens", "has every position in it", {"prompt": "all", "left": True, "pad": True}),
    ]
    base = replay.arrays["mask"]
    size = int(base.sum(1).max(initial=0))
    # Less is a fault of the loss alone: in a record, most rows would show another length.
    for length in (size,) if stage == "mask_rule" else range(size, 0, -1):
        options.append((f"first {length} tokens", f"has at most {length} tokens of a row in it", {"size": length}))
        options.append((f"last {length} tokens", f"has the last {length} tokens of a row in it", {"tail": length}))
    if stage == "mask_rule" and {"prompt_lengths", "lengths"} <= set(replay.arrays):
        position = np.arange(replay.shape[1])
        base = (position >= replay.arrays["prompt_lengths"][:, None]) & (position < replay.arrays["lengths"][:, None])
    masks = {base.tobytes(), np.zeros_like(base).tobytes()}
    for name, text, settings in options:
        mask = apply_rule(base, MaskRule(**settings), replay.layout).tobytes()
        if mask not in masks:
            masks.add(mask)
            kind = (
                rare if {"size", "tail", "before", "inside"} & set(settings) and settings.get("size") != size else make
            )
            yield kind(stage, name, f"the {title} {text}", **settings)


def kl_mask_causes(replay: Replay) -> Iterator[Cause]:
    """Yields the masks of the KL term alone."""
    kl = replay.plan.recipe.kl or Kl(place="")
    if kl.place == "loss":
        yield from mask_causes(replay, "kl_mask", "mask of the KL term")
    if kl.place == "reward":
        mask = replay.arrays["mask"]
        for cause in mask_causes(replay, "kl_mask", "mask of the KL in the reward"):
            # The KL of a token outside the mask is not recorded.
            if (apply_rule(mask, MaskRule(**dict(cause.settings)), replay.layout) <= mask).all():
                yield cause
