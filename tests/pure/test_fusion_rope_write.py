"""The product of q, k and v that turns them and fills the cache: what becomes it, and where the write stays apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from fusing import spec_of, unchanged_by
from small_graphs import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, ROWS, SmallGraph
from tiny_llama import PATHS

from vkdecode.graph import FUSIONS, KvWriteAttrs, LinearAttrs, NodeId, Op, ViewAttrs, WeightSpec, optimize_graph
from vkdecode.graph.fusion import fuse_norm, fuse_norm_rope, fuse_qk_norm, fuse_qkv, fuse_rope_write
from vkdecode.weights import DType

SIZES = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
TOTAL = sum(SIZES.values())


class Layer(NamedTuple):
    """Products of x, q and k of them turned, and attention over them."""

    graph: SmallGraph
    x: NodeId
    q: NodeId
    k: NodeId
    v: NodeId
    turned_q: NodeId
    turned_k: NodeId
    attention: NodeId

    @property
    def write(self) -> NodeId:
        return self.graph.write_of(self.attention)


def layer(
    bias: str = "",
    rotary_dim: int | None = HEAD_DIM,
    path: tuple[str, str] = PATHS[0],
    turn: Callable[[SmallGraph, NodeId, int], NodeId] | None = None,
    normed: bool = False,
) -> Layer:
    """`turn` is what is done to k instead; `bias` names the products that have one."""
    graph = SmallGraph()
    x = graph.hidden()
    h = graph.norm(x) if normed else x
    q, k, v = (graph.product(h, name, rows, bias=name in bias) for name, rows in SIZES.items())
    turned_q, turned_k = q, k
    if rotary_dim is not None:
        turned_q, turned_k = graph.turned(q, HEADS, rotary_dim), graph.turned(k, KV_HEADS, rotary_dim)
    if turn is not None:
        turned_k = turn(graph, k, KV_HEADS)
    attention = graph.attend(turned_q, turned_k, v, *path)
    fuse_qkv(graph, (attention,))
    return Layer(graph, x, q, k, v, turned_q, turned_k, attention)


def fused(made: Layer) -> NodeId:
    """The product that an attention reads, which must have written its rows too."""
    graph = made.graph
    product, cache_k, cache_v, written, *_ = graph.node(made.attention).inputs
    assert graph.node(product).op is Op.LINEAR
    assert product == written
    assert (cache_k, cache_v) == graph.caches()
    ops = {graph.node(one).op for one in graph.reachable([made.attention])}
    assert not ops & {Op.KV_WRITE, Op.ROPE, Op.VIEW}
    return product


# What becomes it


@pytest.mark.parametrize("path", PATHS)
def test_a_product_turns_q_and_k_and_fills_the_cache(path: tuple[str, str]) -> None:
    made = layer(path=path)
    graph = made.graph
    attrs = graph.node(made.attention).attrs
    first = graph.attrs(made.write, KvWriteAttrs).cached_len
    assert fuse_rope_write(graph, (made.attention,)) == (made.attention,)
    product = fused(made)
    assert graph.node(product).shape == (1, SIZES["q"])
    write = KvWriteAttrs(KV_HEADS, HEAD_DIM, first)
    assert graph.node(product).attrs == LinearAttrs(epilogue="rope", rotary_dim=HEAD_DIM, write=write)
    assert (first is None) == (path[0] == "device")
    assert (first == ROWS) == (path == ("symenv", "masked"))
    x, weight, *rest = graph.node(product).inputs
    offset = [graph.find_data("offset")] if path[0] == "device" else []
    assert rest == [*graph.angles(), *graph.caches(), graph.token_count(), *offset]
    assert x == made.x
    assert spec_of(graph, weight) == WeightSpec(
        ("q", "k", "v"), tuple(SIZES.values()), HIDDEN, DType.F16, order="rope", head_dim=8, rotary_dim=8
    )
    assert graph.node(made.attention).attrs == attrs
    assert graph.node(made.attention).inputs[4] == graph.token_count()


@pytest.mark.parametrize("bias", ["q", "v", "qk", "qkv"])
def test_biases_are_turned_like_their_rows(bias: str) -> None:
    made = layer(bias)
    graph = made.graph
    fuse_rope_write(graph, (made.attention,))
    product = fused(made)
    assert graph.attrs(product, LinearAttrs).bias
    stacked = spec_of(graph, graph.node(product).inputs[2])
    assert stacked.names == tuple(f"{name}.bias" if name in bias else None for name in "qkv")
    assert (stacked.order, stacked.head_dim, stacked.rotary_dim) == ("rope", HEAD_DIM, HEAD_DIM)
    assert (stacked.vector, stacked.dtype) == (True, DType.F32)
    assert graph.node(product).inputs[3:5] == graph.angles()


def test_a_rotation_of_part_of_a_head_is_kept() -> None:
    made = layer(rotary_dim=4)
    fuse_rope_write(made.graph, (made.attention,))
    product = fused(made)
    assert made.graph.attrs(product, LinearAttrs).rotary_dim == 4
    assert spec_of(made.graph, made.graph.node(product).inputs[1]).rotary_dim == 4


def test_layers_that_turn_nothing_fill_the_cache_too() -> None:
    made = layer(bias="k", rotary_dim=None)
    graph = made.graph
    fuse_rope_write(graph, (made.attention,))
    product = fused(made)
    assert graph.attrs(product, LinearAttrs).rotary_dim == 0
    assert spec_of(graph, graph.node(product).inputs[1]).rotary_dim == 0
    assert graph.node(product).inputs[3:] == (*graph.caches(), graph.token_count(), graph.find_data("offset"))


def test_a_norm_of_x_goes_before_what_the_write_takes() -> None:
    made = layer(bias="q", normed=True)
    graph = made.graph
    fuse_norm(graph, (made.attention,))
    fuse_rope_write(graph, (made.attention,))
    product = fused(made)
    attrs = graph.attrs(product, LinearAttrs)
    assert (attrs.norm_epsilon, attrs.bias, attrs.epilogue) == (1e-5, True, "rope")
    x, _, _, norm, *rest = graph.node(product).inputs
    assert (x, norm) == (made.x, graph.vector("norm", HIDDEN))
    assert rest == [*graph.angles(), *graph.caches(), graph.token_count(), graph.find_data("offset")]


def test_each_layer_has_its_own() -> None:
    graph = SmallGraph()
    roots = []
    for number in range(2):
        x = graph.hidden(f"x{number}")
        q, k, v = (graph.product(x, f"{name}{number}", rows) for name, rows in SIZES.items())
        roots.append(graph.attend(graph.turned(q, HEADS), graph.turned(k, KV_HEADS), v))
    for fuse in (fuse_qkv, fuse_rope_write):
        fuse(graph, tuple(roots))
    products = [graph.node(root).inputs[0] for root in roots]
    assert len(set(products)) == 2
    names = [spec_of(graph, graph.node(one).inputs[1]).names for one in products]
    assert names == [("q0", "k0", "v0"), ("q1", "k1", "v1")]


def test_what_was_fused_stays_so() -> None:
    made = layer()
    fuse_rope_write(made.graph, (made.attention,))
    assert unchanged_by(fuse_rope_write, made.graph, made.attention)
    assert unchanged_by(fuse_qkv, made.graph, made.attention)
    assert unchanged_by(fuse_qk_norm, made.graph, made.attention)


# Where the write stays apart


def stays(made: Layer, *roots: NodeId) -> bool:
    """Whether nothing fuses, so that the rows are written by a dispatch of their own."""
    same = unchanged_by(fuse_rope_write, made.graph, made.attention, *roots)
    return same and made.graph.node(made.write).op is Op.KV_WRITE


@pytest.mark.parametrize("rotary_dim", [2, 6])
def test_pairs_that_do_not_fill_a_lane_stay_apart(rotary_dim: int) -> None:
    assert stays(layer(rotary_dim=rotary_dim))


@pytest.mark.parametrize("part", ["q", "k", "v", "turned_q", "turned_k"])
def test_values_that_others_use_too_stay(part: str) -> None:
    for used in (True, False):
        made = layer()
        node: NodeId = getattr(made, part)
        assert stays(made, made.graph.silu(node) if used else node)


def test_a_product_that_others_use_too_stays() -> None:
    made = layer()
    (product,) = made.graph.node(made.v).inputs
    assert stays(made, made.graph.silu(product))
    other = made.graph.add_node(Op.VIEW, [product], (1, 4), ViewAttrs(0))
    assert stays(made, made.graph.silu(other))


def test_a_write_that_others_wait_for_too_stays() -> None:
    made = layer()
    graph = made.graph
    attention = graph.node(made.attention)
    inputs = [graph.product(made.x, "another q", SIZES["q"]), *attention.inputs[1:]]
    other = graph.add_node(Op.ATTENTION, inputs, attention.shape, attention.attrs)
    assert stays(made, other)


@pytest.mark.parametrize(
    "turn",
    [
        pytest.param(lambda graph, k, heads: k, id="not at all"),
        pytest.param(lambda graph, k, heads: graph.turned(k, heads, 4), id="less"),
        pytest.param(
            lambda graph, k, heads: graph.rope(
                k, graph.data("other", (1, HEAD_DIM // 2)), graph.angles()[1], heads, HEAD_DIM, HEAD_DIM
            ),
            id="by other angles",
        ),
        pytest.param(lambda graph, k, heads: graph.turned(graph.silu(k), heads), id="behind something else"),
    ],
)
def test_keys_that_are_turned_another_way_than_queries_stay(turn: Callable[[SmallGraph, NodeId, int], NodeId]) -> None:
    made = layer(turn=turn)
    assert made.graph.node(made.write).inputs[1] == made.v
    assert stays(made)


def test_products_that_do_not_belong_together_stay() -> None:
    """Of other values, or in other types, as some files mix them."""
    for other_x, dtype in ((True, DType.F16), (False, DType.Q8_0)):
        graph = SmallGraph()
        x = graph.hidden()
        q, k = graph.product(x, "q", SIZES["q"]), graph.product(x, "k", SIZES["k"])
        v = graph.product(graph.hidden("y") if other_x else x, "v", SIZES["v"], dtype)
        turned_q, turned_k = graph.turned(q, HEADS), graph.turned(k, KV_HEADS)
        attention = graph.attend(turned_q, turned_k, v)
        assert unchanged_by(fuse_qkv, graph, attention)
        assert stays(Layer(graph, x, q, k, v, turned_q, turned_k, attention))


def test_views_in_another_order_stay() -> None:
    made = layer(rotary_dim=None)
    graph = made.graph
    (product,) = graph.node(made.v).inputs
    for offsets in ((0, SIZES["q"] + SIZES["k"], SIZES["q"]), (4, SIZES["q"], SIZES["q"] + SIZES["k"])):
        for node, offset in zip((made.q, made.k, made.v), offsets, strict=True):
            graph.rewrite(node, Op.VIEW, [product], ViewAttrs(offset))
        assert stays(made)


def test_a_product_with_more_columns_than_the_three_stays() -> None:
    made = layer(rotary_dim=None)
    graph = made.graph
    wide = graph.product(made.x, "wide", TOTAL + 8)
    for node, offset in ((made.q, 0), (made.k, SIZES["q"]), (made.v, SIZES["q"] + SIZES["k"])):
        graph.rewrite(node, Op.VIEW, [wide], ViewAttrs(offset))
    assert stays(made)


@pytest.mark.parametrize("attrs", [{"activation": Op.SILU}, {"residual": True}])
def test_a_product_that_does_more_stays(attrs: dict[str, object]) -> None:
    made = layer()
    graph = made.graph
    (product,) = graph.node(made.v).inputs
    inputs = [*graph.node(product).inputs, *([graph.hidden("r", TOTAL)] if "residual" in attrs else [])]
    graph.rewrite(product, Op.LINEAR, inputs, LinearAttrs(**attrs))  # type: ignore[arg-type]  # fits the fields
    assert stays(made)


def test_heads_that_are_normalized_stay() -> None:
    """Norm and rotation of q and k are a dispatch behind the product, and the write is one behind that."""
    graph = SmallGraph()
    x = graph.hidden()
    q, k, v = (graph.product(x, name, rows) for name, rows in SIZES.items())
    normed = [
        graph.rms_norm(one, graph.vector(f"norm{heads}", HEAD_DIM), 1e-5, heads)
        for one, heads in ((q, HEADS), (k, KV_HEADS))
    ]
    turned_q, turned_k = graph.turned(normed[0], HEADS), graph.turned(normed[1], KV_HEADS)
    made = Layer(graph, x, q, k, v, turned_q, turned_k, graph.attend(turned_q, turned_k, v))
    for fuse in FUSIONS[:-1]:
        fuse(graph, (made.attention,))
    assert graph.node(turned_q).op is graph.node(turned_k).op is Op.VIEW
    assert stays(made)
    for fuse in (fuse_norm_rope, fuse_qk_norm):
        assert unchanged_by(fuse, graph, made.attention)


@pytest.mark.parametrize("rotary_dim", [None, HEAD_DIM])
def test_a_product_that_is_split_is_joined_before_anything_turns(rotary_dim: int | None) -> None:
    made = layer(rotary_dim=rotary_dim, path=("symenv", "bounded"))
    graph = made.graph
    optimize_graph(graph, (made.attention,), "gpu", max_units=lambda _: TOTAL // 2)
    assert graph.node(made.write).op is Op.KV_WRITE
    nodes = [graph.node(one) for one in graph.reachable([made.attention])]
    products = [graph.attrs(node.id, LinearAttrs) for node in nodes if node.op is Op.LINEAR]
    assert products == [LinearAttrs()] * 2
    assert sum(node.op is Op.CONCAT for node in nodes) == 1
    assert sum(node.op is Op.ROPE for node in nodes) == (0 if rotary_dim is None else 2)
    whole = layer(rotary_dim=rotary_dim, path=("symenv", "bounded"))
    optimize_graph(whole.graph, (whole.attention,), "gpu", max_units=lambda _: TOTAL)
    fused(whole)


def test_the_optimizer_fuses_behind_splitting_wherever_the_pass_stands() -> None:
    for fusions in (FUSIONS, FUSIONS[::-1]):
        graph = SmallGraph()
        x = graph.hidden()
        q, k, v = (graph.product(x, name, rows) for name, rows in SIZES.items())
        attention = graph.attend(graph.turned(q, HEADS), graph.turned(k, KV_HEADS), v)
        optimize_graph(graph, (attention,), "gpu", fusions=fusions, max_units=lambda spec: TOTAL)
        assert graph.attrs(graph.node(attention).inputs[0], LinearAttrs).epilogue == "rope"
    assert FUSIONS[-1] is fuse_rope_write
