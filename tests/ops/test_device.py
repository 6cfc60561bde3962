"""The operations for other devices equal the reference up to rounding; run on the CPU by taking the definition away."""

import math
import random

import pytest
import torch

from lampejo import ops
from lampejo.models.config import DeltaNetConfig
from lampejo.ops import Run, Segment, device, recurrence, reference

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of the largest value
DTYPES = list(TOLERANCE)


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """``expected`` was computed in fp32 from the same rounded inputs."""
    assert ours.shape == expected.shape
    tolerance = TOLERANCE[ours.dtype] * max(1.0, expected.abs().max().item())
    assert (ours.float() - expected.float()).abs().max() <= tolerance  # false for a NaN


def in_fp32(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.float() for x in tensors]


def test_a_device_settles_the_version(monkeypatch):
    """Fault: the reference's loops on a GPU, or its counterpart on a CPU, where rows must not see each other."""
    segments = [Segment(0, 1, 0, [0])]
    assert ops.plan_attention(CPU, segments, 8) is segments
    assert isinstance(ops.plan_attention(torch.device("meta"), segments, 8), device.Plan)
    x, weight = torch.randn(3, 8, device="meta"), torch.randn(5, 8, device="meta")
    assert ops.linear(x, weight).shape == (3, 5)
    monkeypatch.setattr(ops, "DEFINITION_ON", ())
    assert isinstance(ops.plan_attention(CPU, segments, 8), device.Plan)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_small_operations_equal_the_reference(dtype):
    """Fault: a norm that forgets its offset or rounds its inputs; ends of the range."""
    x = (torch.randn(7, 5, 32) * 4).to(dtype)
    x[0, 0, :4] = torch.tensor([-60.0, 60.0, 0.0, -11.0])
    weight, y = torch.randn(32).to(dtype), torch.randn(7, 5, 32).to(dtype)
    for offset in (False, True):
        expected = reference.rms_norm(*in_fp32(x, weight), 1e-5, offset)
        assert_close(device.rms_norm(x, weight, 1e-5, offset), expected)
    assert_close(device.sigmoid(x), reference.sigmoid(x.float()))
    assert_close(device.swiglu(x, y), reference.swiglu(*in_fp32(x, y)))
    matrix = torch.randn(9, 32).to(dtype)
    assert_close(device.linear(x.flatten(0, 1), matrix), reference.linear(*in_fp32(x.flatten(0, 1), matrix)))


def paged_rows(
    lengths: list[int], num_kv: int, head_dim: int, page_size: int, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Caches in shuffled pages that hold ``lengths[r]`` tokens of row r, and NaN everywhere else; page tables."""
    num_pages = [-(-n // page_size) + 1 for n in lengths]
    pages = torch.randperm(sum(num_pages) + 3).tolist()
    tables = [[pages.pop() for _ in range(n)] for n in num_pages]
    total = sum(num_pages) + 3
    k_cache = torch.full((total, num_kv, head_dim, page_size), math.nan, dtype=dtype)
    v_cache = torch.full((total, num_kv, page_size, head_dim), math.nan, dtype=dtype)
    for n, table in zip(lengths, tables, strict=True):
        slots = torch.tensor([table[p // page_size] * page_size + p % page_size for p in range(n)], dtype=torch.long)
        reference.write_pages(k_cache, v_cache, *torch.randn(2, n, num_kv, head_dim), slots)
    return [k_cache, v_cache], tables


# position and number of tokens of each row: decoding, verifying, prefill, all at once; rows of one token, of one length
STEPS = {
    "one token": [(0, 1)],
    "one token, later": [(45, 1)],
    "decoding": [(0, 1), (17, 1), (300, 1), (31, 1)],
    "equal rows": [(40, 4), (40, 4)],
    "verifying": [(12, 5), (3000, 9), (2047, 1), (63, 16)],
    "prefill": [(0, 200)],
    "later chunk": [(130, 77)],
    "everything": [(500, 1), (0, 150), (9, 6), (2100, 3), (100, 40), (0, 1)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STEPS)
def test_paged_attention_equals_the_reference(name, dtype):
    """Faults: padding that is seen, a row's output in another's place, NaN in what a page holds past a row's end."""
    step = STEPS[name]
    num_kv, group, head_dim, page_size = 2, 3, 16, 32
    caches, tables = paged_rows([p + n for p, n in step], num_kv, head_dim, page_size, dtype)
    starts = [sum(n for _, n in step[:i]) for i in range(len(step))]
    segments = [Segment(s, n, p, t) for s, (p, n), t in zip(starts, step, tables, strict=True)]
    q = torch.randn(sum(n for _, n in step), num_kv * group, head_dim).to(dtype)
    ours = device.paged_attention(q, *caches, device.plan_attention(CPU, segments, page_size))
    assert ours.dtype == dtype
    assert_close(ours, reference.paged_attention(q.float(), *caches, segments))


def test_long_segments_go_in_tiles(monkeypatch):
    """Fault: a mask of gigabytes for a long prompt; tiles that see too little of each other."""
    monkeypatch.setattr(device, "MASK_ELEMENTS", 20 * 350)
    caches, (table,) = paged_rows([350], 1, 8, 32, torch.float32)
    segments = [Segment(0, 150, 200, table)]
    plan = device.plan_attention(CPU, segments, 32)
    q = torch.randn(150, 4, 8)
    assert_close(device.paged_attention(q, *caches, plan), reference.paged_attention(q, *caches, segments))
    assert sum(len(part.tiles) for part in plan.parts) == 8 and max(p.num_queries for p in plan.parts) == 20


def test_a_plan_serves_layers_with_other_heads():
    """Fault: a mask made for one number of heads, used for another."""
    caches, tables = paged_rows([9, 30], 2, 8, 16, torch.float32)
    segments = [Segment(0, 3, 6, tables[0]), Segment(3, 2, 28, tables[1])]
    plan = device.plan_attention(CPU, segments, 16)
    for num_heads in (2, 8, 4):
        q = torch.randn(5, num_heads, 8)
        assert_close(device.paged_attention(q, *caches, plan), reference.paged_attention(q, *caches, segments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("anchors", [[20], [0], [0, 0], [3, 0, 90, 31], [64, 64]], ids=str)
def test_block_attention_equals_the_reference(anchors, causal, dtype):
    """Faults: windows counted from the wrong end, a context of nothing beside one of something, NaN from the anchor on.
    One plan for all windows, as the layers of a drafter share it."""
    num_kv, group, head_dim, page_size, block = 2, 2, 8, 16, 6
    caches, tables = paged_rows(anchors, num_kv, head_dim, page_size, dtype)
    segments = [Segment(i * block, block, a, t) for i, (a, t) in enumerate(zip(anchors, tables, strict=True))]
    plan = device.plan_attention(CPU, segments, page_size)
    q = torch.randn(len(anchors) * block, num_kv * group, head_dim).to(dtype)
    k, v = torch.randn(2, len(anchors) * block, num_kv, head_dim).to(dtype)
    for window in (None, 1, 3, 7, 50):
        ours = device.paged_block_attention(q, k, v, *caches, plan, causal, window)
        assert ours.dtype == dtype
        floats = in_fp32(q, k, v, *caches)
        assert_close(ours, reference.paged_block_attention(*floats, segments, causal, window))


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_experts_equal_the_reference(num_tokens, dtype, grouped, monkeypatch):
    """Faults: an expert's tokens by its neighbour's matrix, outputs of a token in another's place, experts without
    tokens; with grouped products and without."""
    if not grouped:
        monkeypatch.setattr(device, "_has_grouped_products", lambda *_: False)
    num_experts, hidden, inner = 9, 32, 24
    gate_up = (torch.randn(num_experts, 2 * inner, hidden) / 5).to(dtype)
    down = (torch.randn(num_experts, hidden, inner) / 5).to(dtype)
    x = torch.randn(num_tokens, hidden).to(dtype)
    router = torch.randn(num_tokens, num_experts).to(dtype)
    for num_active, normalised in ((1, False), (3, True), (9, True)):
        ours = device.experts(x, router, gate_up, down, num_active, normalised)
        assert ours.dtype == dtype
        assert_close(ours, reference.experts(*in_fp32(x, router, gate_up, down), num_active, normalised))


def test_grouped_products_are_used_where_they_are(monkeypatch):
    """Fault: a probe that never succeeds, and a host that waits for the device in every layer."""
    assert device._has_grouped_products(CPU, torch.bfloat16)
    monkeypatch.setattr(device, "_grouped_mm", None)  # an older PyTorch
    device._has_grouped_products.cache_clear()
    assert not device._has_grouped_products(CPU, torch.bfloat16)
    device._has_grouped_products.cache_clear()
    matrices = torch.randn(3, 2 * 5, 7), torch.randn(3, 7, 5)  # rows that are no multiples of 16 bytes
    x, router = torch.randn(4, 7), torch.randn(4, 3)
    assert_close(device.experts(x, router, *matrices, 2, True), reference.experts(x, router, *matrices, 2, True))


SIZES = DeltaNetConfig((), num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=12, conv_size=4)
NUM_SLOTS = 8
# length, source, stores of each run: rows that begin, decode, are verified (no store), are cut for snapshots
RUNS = {
    "begins": [Run(0, 1, None, [(1, 3)])],
    "decodes": [Run(0, 1, 2, [(1, 2)])],
    "is verified": [Run(0, 9, 2, [])],
    "is committed in part": [Run(2, 3, 2, [(3, 2)])],
    "is cut": [Run(0, 150, None, [(32, 5), (128, 6), (150, 1)])],
    "is saved at its end": [Run(0, 7, 4, [(7, 5), (7, 4)])],
    "all together": [
        Run(0, 1, 0, [(1, 0)]), Run(1, 9, 1, []), Run(10, 70, None, [(32, 6), (70, 2)]), Run(80, 2, 3, [(2, 3)]),
        Run(82, 5, 4, []), Run(87, 1, None, [(1, 5)]), Run(88, 16, 7, [(1, 7)]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RUNS)
def test_runs_of_the_delta_rule_equal_the_reference(name, dtype):
    """Faults: padding that moves a state or a window, a state that goes to another's slot or begins with what the slot
    held before, a state moved by drafts. States and windows are fp32 whatever the inputs are."""
    runs = RUNS[name]
    num_tokens = max(run.start + run.length for run in runs) + 3
    mixed = torch.randn(num_tokens, SIZES.num_channels).to(dtype)
    log_decay, beta = -torch.rand(num_tokens, 4) * torch.tensor([5.0, 0.01, 1.0, 0.1]), torch.rand(num_tokens, 4)
    conv_weight = torch.randn(SIZES.num_channels, 4).to(dtype)
    windows, states = torch.randn(NUM_SLOTS, SIZES.num_channels, 3), torch.randn(NUM_SLOTS, 4, 8, 12)
    sources = [run.source for run in runs]
    unread = [slot for slot in range(NUM_SLOTS) if slot not in sources]
    windows[unread], states[unread] = math.nan, math.nan
    kept = [(windows.clone(), states.clone()) for _ in range(2)]
    inputs = mixed, log_decay, beta, conv_weight, SIZES
    expected = recurrence.delta_net_runs(*inputs, *kept[0], recurrence.plan_runs(CPU, runs))
    ours = device.delta_net_runs(*inputs, *kept[1], device.plan_runs(CPU, runs))
    assert ours.dtype == torch.float32
    assert_close(ours, expected)
    stored = {slot for run in runs for _, slot in run.stores}
    for slot in range(NUM_SLOTS):
        for x, y, before in zip(kept[1], kept[0], (windows, states), strict=True):
            if slot in stored:
                assert_close(x[slot], y[slot])
            else:
                assert torch.equal(x[slot].nan_to_num(9), before[slot].nan_to_num(9))


def test_any_mixture_of_runs_and_segments_equals_the_reference():
    """Whatever lengths come together: sizes that share a call and sizes that do not."""
    rng = random.Random(0)
    for _ in range(25):
        lengths = [rng.choice([1, 1, 2, 5, 9, 17, 40]) for _ in range(rng.randint(1, 6))]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        positions = [rng.choice([0, 3, 33, 200]) for _ in lengths]
        caches, tables = paged_rows([p + n for p, n in zip(positions, lengths, strict=True)], 1, 8, 8, torch.float32)
        segments = [Segment(*parts) for parts in zip(starts, lengths, positions, tables, strict=True)]
        q = torch.randn(sum(lengths), 2, 8)
        ours = device.paged_attention(q, *caches, device.plan_attention(CPU, segments, 8))
        assert_close(ours, reference.paged_attention(q, *caches, segments))

        runs = []
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            ends = sorted({rng.randint(1, length), length})
            stores = [] if rng.random() < 0.3 else [(end, row) for end in ends]
            runs.append(Run(start, length, rng.choice([None, row]), stores))
        mixed, log_decay, beta = (torch.rand(sum(lengths), n) for n in (SIZES.num_channels, 4, 4))
        weight, windows = torch.randn(SIZES.num_channels, 4), torch.randn(6, SIZES.num_channels, 3)
        states = torch.randn(6, 4, 8, 12)
        theirs = windows.clone(), states.clone()
        inputs = mixed - 0.5, -log_decay, beta, weight, SIZES
        expected = recurrence.delta_net_runs(*inputs, *theirs, runs)
        assert_close(device.delta_net_runs(*inputs, windows, states, device.plan_runs(CPU, runs)), expected)
        assert_close(windows, theirs[0])
        assert_close(states, theirs[1])
