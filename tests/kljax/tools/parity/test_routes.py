"""Routes of a dump: a trainer that chose for itself, lost layers and shifts are named, in every order of experts."""

import pathlib

import numpy as np
import pytest

from kljax.__main__ import main
from kljax.tools.parity.command import compare
from kljax.tools.parity.report import ParityReport
from tests.parity import write_dump

ROWS, LENGTH, LAYERS, EXPERTS, ACTIVE = 3, 7, 3, 8, 2


def recorded_routes() -> np.ndarray:
    """Routes with padding before each row, and none of its last token."""
    rng = np.random.default_rng(0)
    routes = rng.random((ROWS, LENGTH, LAYERS, EXPERTS)).argsort(-1)[..., :ACTIVE]
    for row in range(ROWS):
        routes[row, :row] = -1
    routes[:, -1] = -1
    return routes


def report_of(path: pathlib.Path, **arrays: np.ndarray) -> ParityReport:
    numbers = {"log_probs": np.full((ROWS, LENGTH), -1.0), "mask": np.ones((ROWS, LENGTH))}
    write_dump(path / "dump.npz", {}, {**numbers, **arrays})
    return compare(path / "dump.npz")


def changed(routes: np.ndarray, layers: slice, share: float) -> np.ndarray:
    """Other experts for some pairs of a token and a layer; the trainer also routes padding."""
    rng, used = np.random.default_rng(1), np.where(routes < 0, [0, 1], routes)
    turned = rng.random(used.shape[:3]) < share
    turned[:, :, layers.stop :] = turned[:, :, : layers.start] = False
    return np.where(turned[..., None], (used + 1) % EXPERTS, used)


def test_equal_sets_agree_in_any_order(tmp_path: pathlib.Path) -> None:
    routes = recorded_routes()
    report = report_of(tmp_path, routed_experts=routes, used_experts=np.where(routes < 0, 3, routes)[..., ::-1])
    (difference,) = report.differences
    assert (difference.field, difference.compared) == ("used_experts", LAYERS * (6 + 5 + 4))
    assert report.agrees


@pytest.mark.parametrize(
    ("layers", "share", "key", "text"),
    [
        (slice(0, LAYERS), 0.3, "routes: not replayed", "routes not replayed: the trainer chose other experts for"),
        (slice(1, 2), 0.5, "routes: not replayed in some layers", "routes not replayed in layer 1 of the 3"),
    ],
)
def test_unused_routes_are_the_cause(tmp_path, layers: slice, share: float, key: str, text: str) -> None:
    routes = recorded_routes()
    used = changed(routes, layers, share)
    report = report_of(tmp_path, routed_experts=routes, used_experts=used)
    (cause,) = report.causes
    assert cause.key == key
    assert text in cause.text
    known = (routes >= 0).all(-1)
    row, token, layer = np.argwhere(known & (np.sort(routes) != np.sort(used)).any(-1))[0]
    assert report.findings[0].difference.at == (row, token)
    assert report.findings[0].difference.expected in routes[row, token, layer]


@pytest.mark.parametrize(("shift", "neighbour"), [(1, "before"), (-1, "after")])
def test_shifted_routes_are_the_cause(tmp_path, shift: int, neighbour: str) -> None:
    routes = recorded_routes()
    report = report_of(tmp_path, routed_experts=routes, used_experts=np.roll(routes, shift, axis=1))
    assert [cause.key for cause in report.causes] == [f"routes: of the token {neighbour}"]


def test_routes_of_one_side_are_not_compared(tmp_path: pathlib.Path) -> None:
    report = report_of(tmp_path, routed_experts=recorded_routes())
    assert report.differences == ()
    assert report.not_compared[-1] == ("routed_experts", "needs used_experts")


def test_command_names_unused_routes(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    routes = recorded_routes()
    report_of(tmp_path, routed_experts=routes, used_experts=changed(routes, slice(0, LAYERS), 0.3))
    assert main(["parity", str(tmp_path / "dump.npz")]) == 1
    assert "used_experts: routes not replayed: the trainer chose other experts" in capsys.readouterr().out


def test_notes_have_flips_by_layer_and_lag(tmp_path: pathlib.Path) -> None:
    routes = recorded_routes()
    used = changed(routes, slice(1, 2), 0.5)
    report = report_of(tmp_path, routed_experts=routes, used_experts=used, lag=np.array([0, 4, 4]))
    differs = (np.sort(routes) != np.sort(used)).any(-1) & (routes >= 0).all(-1)
    pairs = np.array([6, 5, 4]) * LAYERS
    by_layer = 100 * differs.sum((0, 1)) / 15
    by_lag = 100 * differs[0].sum() / pairs[0], 100 * differs[1:].sum() / pairs[1:].sum()
    expected = [f"% by layer: {', '.join(f'{share:.3g}' for share in by_layer)}"]
    expected += [f"at a lag of {lag}: {share:.3g} %" for lag, share in zip((0, 4), by_lag, strict=True)]
    assert [note.partition("recorded")[2].lstrip(", ") for note in report.notes[:3]] == expected


def test_notes_have_loads_and_entropy_by_layer(tmp_path: pathlib.Path) -> None:
    routes = recorded_routes()
    routes[1] = -1
    entropy = np.broadcast_to([1.0, 0.5, 0.25], (ROWS, LENGTH, LAYERS))
    *_, missing, loads, routers = report_of(tmp_path, routed_experts=routes, router_entropy=entropy).notes
    counts = [np.bincount(routes[:, :, layer][routes[:, :, layer] >= 0], minlength=EXPERTS) for layer in range(LAYERS)]
    assert missing == "routes: 1 of 3 rows have none recorded"
    assert loads.endswith(", ".join(f"{count.max() / count.mean():.2f}" for count in counts))
    assert routers.endswith("1.000, 0.500, 0.250")
