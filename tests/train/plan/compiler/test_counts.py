"""Operations and bytes of compiled programs, on texts counted by hand and on programs whose counts are known."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.models.attention import attend
from train.models.attention.blocks import expected_visits
from train.models.attention.spans import row_spans
from train.plan.compiler.flops import count_flops
from train.plan.compiler.hlo import parse
from train.plan.compiler.traffic import count_traffic, memory_bytes


def program(*lines: str, others: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"{others}\nENTRY %main (a: f32[1]) -> f32[1] {{\n{body}\n}}\n"


def flops_of(*lines: str) -> float:
    return count_flops(parse(program(*lines)))


def test_a_dot():
    a, b = "%a = bf16[3,7,5]{2,1,0} parameter(0)", "%b = bf16[3,5,11]{2,1,0} parameter(1)"
    dims = "lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}"
    assert flops_of(a, b, f"ROOT %c = f32[3,7,11]{{2,1,0}} dot(%a, %b), {dims}") == 2 * 3 * 7 * 5 * 11


def test_a_matmul_of_cublas():
    a, b = "%a = bf16[7,5]{1,0} parameter(0)", "%b = bf16[5,11]{1,0} parameter(1)"
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    options = f'custom_call_target="__cublas$gemm", backend_config={config}'
    call = f"%c = (bf16[7,11]{{1,0}}, s8[64]{{0}}) custom-call(%a, %b), {options}"
    assert flops_of(a, b, call) == 2 * 7 * 5 * 11


def test_kernels_of_attention():
    operands = [f"%{name} = bf16[2,{length},4,8]{{3,2,1,0}} parameter(0)" for name, length in (("q", 6), ("k", 10))]
    call = (
        '%c = (bf16[2,4,6,8]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaMaskSoftmax"'
    )
    assert flops_of(*operands, call) == 2 * 2 * 2 * 4 * 6 * 10 * 8
    for window, pairs in ((0, 1 + 2 + 3 + 4 + 5 + 6), (3, 1 + 2 + 3 + 3 + 3 + 3)):
        mask = f'"mask_type": "PADDING_CAUSAL", "sliding_window_length": "{window}"'
        config = f'backend_config={{"cudnn_fmha_backend_config": {{{mask}}}}}'
        causal = call.replace("fmhaMaskSoftmax", "fmhaSoftmax").replace("%k, %k", "%q, %q")
        assert flops_of(*operands, f"{causal}, {config}") == 2 * 2 * 2 * 4 * pairs * 8
        backward = causal.replace("fmhaSoftmax", "fmhaSoftmaxBackward")
        assert flops_of(*operands, f"{backward}, {config}") == 2 * 5 * 2 * 4 * pairs * 8
    # Of 10 keys, the 6 queries attend to 5, 6, 7, 8, 9 and 10.
    for kernel, matmuls in (("forward", 2), ("query", 3), ("key", 4)):
        call = '%pallas_call.1 = (f32[2,4,6]{2,1,0}) custom-call(%q, %k, %k), custom_call_target="__gpu$xla.gpu.triton"'
        name = f'metadata={{op_name="jit(f)/transpose(jvp(slots_{kernel}_kernel))/pallas_call"}}'
        assert flops_of(*operands, f"{call}, {name}") == 2 * matmuls * 2 * 4 * 45 * 8
    assert flops_of(*operands, f'{call}, metadata={{op_name="jit(f)/pallas_call"}}') == 0
    options = 'custom_call_target="tpu_custom_call", backend_config={"cost_estimate":{"flops":"1234"}}'
    assert flops_of(*operands, f"%c = f32[2]{{0}} custom-call(%q), {options}") == 1234


@pytest.mark.parametrize("head", ["11,8", "8,11"])
def test_the_kernel_of_the_head(head):
    operands = [
        f"%h = bf16[{head}]{{1,0}} parameter(0)",
        "%x = bf16[6,8]{1,0} parameter(1)",
        "%t = f32[6]{0} parameter(2)",
    ]
    call = '%c = (f32[1,6]{1,0}, f32[6,11]{1,0}) custom-call(%h, %x, %t), custom_call_target="__gpu$xla.gpu.triton"'
    name = 'metadata={op_name="jit(f)/head_sums/pallas_call"}'
    assert flops_of(*operands, f"{call}, {name}") == 2 * 6 * 8 * 11


def test_attention_in_blocks_of_this_machine():
    """Three blocks of queries visit one, two and three blocks of keys: two products forward, five backward."""
    rows, width, heads, head_dim = 2, 300, 4, 16
    spans = row_spans(jnp.ones((rows, width), bool), None)

    def run(query, key, value):
        output, pull = jax.vjp(lambda *x: attend(*x, spans), query, key, value)
        return output, *pull(output)

    arrays = [jax.ShapeDtypeStruct((rows, width, count, head_dim), jnp.float32) for count in (heads, 2, 2)]
    text = jax.jit(run).lower(*arrays).compile({"xla_backend_optimization_level": 0}).as_text()
    assert count_flops(parse(text), expected_visits(width)) == 2 * 7 * rows * heads * head_dim * 6 * 128**2


def test_a_grouped_product():
    """Sizes of groups come first, then rows, and the matrices of groups or the rows of their gradient."""
    sizes, x = "%s = s32[3]{0} parameter(0)", "%x = bf16[7,5]{1,0} parameter(1)"
    w, g = "%w = bf16[3,5,11]{2,1,0} parameter(2)", "%g = bf16[7,11]{1,0} parameter(2)"
    target = 'custom_call_target="mosaic_gpu_v2"'
    rows = f"%c = bf16[7,11]{{1,0}} custom-call(%s, %x, %w), {target}"
    matrices = f"%c = bf16[3,5,11]{{2,1,0}} custom-call(%s, %s, %x, %g), {target}"
    assert flops_of(sizes, x, w, rows) == flops_of(sizes, x, g, matrices) == 2 * 7 * 5 * 11


def naive_window(size: int, kernel: int, output: int, options: dict[str, int]) -> int:
    """Walks over all positions of a window over an input with holes and padding."""
    spaced = np.zeros((size - 1) * options["base"] + 1, bool)
    spaced[:: options["base"]] = True
    hits = 0
    for position, tap in itertools.product(range(output), range(kernel)):
        index = position * options["stride"] - options["pad"] + tap * options["spread"]
        hits += 0 <= index < len(spaced) and bool(spaced[index])
    return hits


@pytest.mark.parametrize("seed", range(30))
def test_convolution_counts_products_with_the_input(seed):
    rng = np.random.default_rng(seed)
    size, kernel, output = (int(rng.integers(1, 9)) for _ in range(3))
    options = {name: int(rng.integers(1, 4)) for name in ("stride", "base", "spread")} | {
        "pad": int(rng.integers(-3, 9))
    }
    window = "size={}x1 stride={}x1 pad={}_0x0_0 lhs_dilate={}x1 rhs_dilate={}x1".format(
        kernel, options["stride"], options["pad"], options["base"], options["spread"]
    )
    actual = flops_of(
        f"%a = bf16[{size},3,1,5]{{3,2,1,0}} parameter(0)",
        f"%b = bf16[{kernel},5,1,7]{{3,2,1,0}} parameter(1)",
        f"%c = f32[{output},3,1,7]{{3,2,1,0}} convolution(%a, %b), window={{{window}}}, dim_labels=0b1f_0i1o->0b1f",
    )
    assert actual == 2 * 3 * 5 * 7 * naive_window(size, kernel, output, options)


def test_a_batched_matmul_as_a_tpu_writes_it():
    # One of the 8 positions of the window meets the input for each of the 8 outputs.
    window = "window={size=8 stride=7 pad=0_0 lhs_dilate=8}"
    actual = flops_of(
        "%a = bf16[8,128,64]{2,1,0} parameter(0)",
        "%b = bf16[8,64,32]{2,1,0} parameter(1)",
        f"ROOT %c = f32[8,128,32]{{2,1,0}} convolution(%a, %b), {window}, dim_labels=0bf_0io->0bf",
    )
    assert actual == 2 * 8 * 128 * 64 * 32


def test_a_program_of_this_machine_with_loops():
    layers, rows, width, hidden = 5, 6, 8, 12
    weights = (jnp.zeros((layers, width, hidden)), jnp.zeros((layers, hidden, width)))

    def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return jnp.sin(jnp.sin(x @ pair[0]) @ pair[1]), None

        return jax.lax.scan(jax.checkpoint(layer), x, weights)[0].sum()

    x = jnp.ones((rows, width))
    single = 2 * rows * width * hidden * layers
    forward = jax.jit(loss).lower(weights, x).compile().as_text()
    assert count_flops(parse(forward)) == 2 * single
    # Two matmuls forward, both recomputed as their results are needed, and four of the gradients.
    both = jax.jit(jax.grad(loss)).lower(weights, x).compile().as_text()
    assert count_flops(parse(both)) == 8 * single


def test_loop_with_a_data_dependent_end():
    def run(x: jax.Array) -> jax.Array:
        with jax.named_scope("decode"):
            return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ x, x)

    text = jax.jit(run).lower(jnp.ones((4, 4))).compile().as_text()
    with pytest.raises(ValueError, match="got the limits"):
        count_flops(parse(text))
    assert count_flops(parse(text), {"decode": 9}) == 9 * 2 * 4**3


KERNELS = """
%slice_kernel (p: f32[6,100], i: s32[]) -> f32[100] {
  %p = f32[6,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %cut = f32[1,100]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,100}
  ROOT %b = f32[100]{0} bitcast(%cut)
}

%update_kernel (p: f32[6,100], x: f32[1,100], i: s32[]) -> f32[6,100] {
  %p.1 = f32[6,100]{1,0} parameter(0)
  %x = f32[1,100]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  ROOT %u = f32[6,100]{1,0} dynamic-update-slice(%p.1, %x, %i.1, %i.1)
}

%gather_kernel (p: f32[6,100], rows: s32[2,1]) -> bf16[2,100] {
  %p.3 = f32[6,100]{1,0} parameter(0)
  %rows = s32[2,1]{1,0} parameter(1)
  %narrow = bf16[6,100]{1,0} convert(%p.3)
  ROOT %taken = bf16[2,100]{1,0} gather(%narrow, %rows), offset_dims={1}, slice_sizes={1,100}
}

%mean_kernel (p: f32[6,100], i: s32[]) -> f32[1] {
  %p.4 = f32[6,100]{1,0} parameter(0)
  %i.4 = s32[] parameter(1)
  %sums = f32[6]{0} reduce(%p.4, %i.4), dimensions={1}
  ROOT %one = f32[1]{0} dynamic-slice(%sums, %i.4), dynamic_slice_sizes={1}
}

%outer (p: f32[6,100], i: s32[]) -> f32[100] {
  %p.2 = f32[6,100]{1,0} parameter(0)
  %i.2 = s32[] parameter(1)
  ROOT %inner = f32[100]{0} fusion(%p.2, %i.2), kind=kLoop, calls=%slice_kernel
}
"""
ARGUMENTS = ("%a = f32[6,100]{1,0} parameter(0)", "%i = s32[] parameter(1)", "%x = f32[1,100]{1,0} parameter(2)",
             "%y = s32[2,1]{1,0} parameter(3)")  # fmt: skip


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%r = f32[6,100]{1,0} add(%a, %a)", 3 * 2400),
        ("%r = f32[6,100]{1,0:T(8,128)S(1)} copy(%a)", 2400),
        ("%r = f32[1,100]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,100}", 2 * 400),
        ("%r = f32[6,100]{1,0} dynamic-update-slice(%a, %x, %i, %i)", 2 * 400),
        ("%r = f32[100]{0} fusion(%a, %i), kind=kLoop, calls=%slice_kernel", 400 + 4 + 400),
        ("%r = f32[100]{0} fusion(%a, %i), kind=kLoop, calls=%outer", 400 + 4 + 400),
        ("%r = f32[6,100]{1,0} fusion(%a, %x, %i), kind=kLoop, calls=%update_kernel", 400 + 4 + 400),
        ("%r = bf16[2,100]{1,0} fusion(%a, %y), kind=kLoop, calls=%gather_kernel", 800 + 8 + 400),
        ("%r = f32[1]{0} fusion(%a, %i), kind=kInput, calls=%mean_kernel", 2400 + 4 + 4),
        (
            "%r = ((f32[6,100]{1,0}, s32[2,1]{1,0}), bf16[2,100]{1,0}) fusion-start(%a, %y), kind=kLoop, "
            "calls=%gather_kernel",
            800 + 8 + 400,
        ),
        ("%r = bf16[2,100]{1,0} fusion-done(%a)", 0),
        (
            "%r = (f32[6,100]{1,0}, f32[1,100]{1,0}) custom-call(%x, %a), "
            'output_to_operand_aliasing={{0}: (1, {})}, custom_call_target="k"',
            400 + 400,
        ),
        ("%r = (f32[6,100]{1,0}, s32[]) tuple(%a, %i)", 0),
        ("%r = (f32[6,100]{1,0:S(1)}, f32[6,100]{1,0}, u32[]{:S(2)}) copy-start(%a)", 2400),
        ("%r = f32[6,100]{1,0:S(1)} copy-done(%a)", 0),
    ],
)
def test_moved_bytes(line, expected):
    assert count_traffic(parse(program(*ARGUMENTS, line, others=KERNELS))) == expected


def test_bytes_of_a_loop():
    def run(stack: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, stack)[0]

    layers, rows, width = 7, 4, 64
    text = jax.jit(run).lower(jnp.zeros((layers, width, width)), jnp.zeros((rows, width))).compile().as_text()
    # Every layer is read once, not the whole stack in every step; the compiler may copy it out first.
    weights = 4 * layers * width * width
    assert weights <= count_traffic(parse(text)) <= 3 * weights + 100 * layers * rows * width


def test_memory_on_the_chip_is_not_main_memory():
    assert memory_bytes("(bf16[8,2]{1,0:T(8,128)(2,1)S(1)}, f32[3]{0}, f32[4]{0:S(0)}, s32[]{:S(5)})") == 12 + 16
