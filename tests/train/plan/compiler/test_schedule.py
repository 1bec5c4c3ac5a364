"""The time of programs whose schedules can be walked by hand, on a device of round rates."""

import pytest

from train.models.devices import Device
from train.plan.compiler.hlo import parse
from train.plan.compiler.schedule import ProgramSeconds, schedule_seconds

# A kernel that reads and writes f32[25] takes 2 s, one that multiplies f32[5,5] with itself 5 s, and 3 for its bytes.
# The missing half of f32[50] takes 1 s on the links, the missing three quarters of f32[100] 3 s.
DEVICE = Device("made up", "cuda", (), memory=1, flops=50, bandwidth=100, links=100, network=10)
COPY = "%c{} = f32[25]{{0}} copy(%a)"
PRODUCT = "%d{} = f32[5,5]{{1,0}} dot(%m, %m), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
PAIRS = "replica_groups={{{{0,1}},{{2,3}}}}, dimensions={{0}}"
START = f"%s{{}} = (f32[25]{{{{0}}}}, f32[50]{{{{0}}}}) all-gather-start(%a), {PAIRS}"
DONE = "%e{0} = f32[50]{{0}} all-gather-done(%s{0})"
GATHER = f"%g{{}} = f32[50]{{{{0}}}} all-gather(%a), {PAIRS}"


def seconds(*lines: str, others: str = "", islands: tuple[int, ...] = (0, 0, 0, 0)) -> ProgramSeconds:
    body = "\n".join(
        f"  {line}" for line in ("%a = f32[25]{0} parameter(0)", "%m = f32[5,5]{1,0} parameter(1)", *lines)
    )
    text = f"HloModule f\n{others}\nENTRY %main (a: f32[25], m: f32[5,5]) -> f32[25] {{\n{body}\n}}\n"
    return schedule_seconds(parse(text), DEVICE, islands)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([COPY.format(0), PRODUCT.format(0)], (7, 0)),
        ([GATHER.format(0)], (0, 1)),
        ([COPY.format(0), GATHER.format(0), COPY.format(1)], (4, 1)),
        ([START.format(0), COPY.format(0), DONE.format(0)], (2, 0)),
        ([START.format(0), DONE.format(0), COPY.format(0)], (2, 1)),
        # Three exchanges share the links: two seconds of a copy hide two of them.
        (
            [
                START.format(0),
                START.format(1),
                START.format(2),
                COPY.format(0),
                DONE.format(0),
                DONE.format(1),
                DONE.format(2),
            ],
            (2, 1),
        ),
        # A synchronous one has to wait for the links.
        ([START.format(0), GATHER.format(0), DONE.format(0)], (0, 2)),
        # What is started, and waited for by nobody here, is hidden.
        ([START.format(0), COPY.format(0)], (2, 0)),
    ],
)
def test_exchanges_are_exposed_that_no_kernel_hides(lines, expected):
    found = seconds(*lines)
    assert (found.kernels, found.exposed) == pytest.approx(expected)


def test_exchanges_between_hosts_take_the_network():
    assert seconds(GATHER.format(0), islands=(0, 1, 0, 1)).exposed == pytest.approx(10)


def computation(name: str, *lines: str) -> str:
    return "\n".join((f"%{name} (p: f32[25]) -> f32[25] {{", "  %a = f32[25]{0} parameter(0)", *lines, "}"))


def test_loops_repeat_their_bodies():
    body = computation("body", f"  {COPY.format(0)}", f"  {GATHER.format(0)}")
    others = f"{body}\n{computation('condition')}"
    loop = '%w = f32[25]{0} while(%a), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"6"}}'
    found = seconds(loop, COPY.format(1), others=others)
    assert (found.kernels, found.exposed) == pytest.approx((14, 6))


def test_steps_of_a_collective_in_fusions_hide_it():
    """A TPU does an exchange beside the work of several fusions, and waits for it at the last."""
    gather = "  %g = f32[100]{0} all-gather(%a), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}"
    root = "  ROOT %r = f32[25]{0} copy(%a)"

    def of_fusions(name: str, count: int) -> tuple[float, float]:
        others = "\n".join(computation(f"{name}.{number}", gather, root) for number in range(count))
        fusions = [f"%f{n} = f32[25]{{0}} fusion(%a), kind=kCustom, calls=%{name}.{n}" for n in range(count)]
        found = seconds(*fusions, others=others)
        return found.kernels, found.exposed

    assert of_fusions("async_collective_fusion", 2) == pytest.approx((4, 0))
    assert of_fusions("async_collective_fusion", 1) == pytest.approx((2, 1))
    # A kernel that exchanges and adds does so once each time.
    assert of_fusions("all-reduce-scatter", 2) == pytest.approx((4, 2))
