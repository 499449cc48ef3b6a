"""The memory that a model will take on a device, counted before any of it is taken."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from models import directory, family

import zoo
from serving.engine.device.arena import check_there_is
from serving.engine.device.staging import recorded_rows
from serving.engine.engine import Engine
from serving.engine.loading import CPU_PART, sizes
from serving.engine.memory.memory_plan import (
    SLOTS,
    SPARE_PART,
    Peak,
    _encoder_bytes,
    fit,
    launch_bytes,
    num_bytes,
    plan,
    state_tensors,
    usual_kv_bytes,
    usual_past_bytes,
    usual_swap_bytes,
)
from serving.settings import Latency, Memory, ModelOptions, Policy, Settings
from zoo import kernels
from zoo.nn import residual

FAMILIES = pytest.mark.parametrize("name", zoo.families())


def shapes(name, dtype="float32"):
    return zoo.load(directory(name, "tiny"), "meta", dtype)


@cache
def plan_of_shapes(name):
    return plan(shapes(name), 3)


@pytest.mark.slow
@FAMILIES
def test_weights_and_state_are_what_the_loaded_model_has(name):
    made, real = plan_of_shapes(name), family(name)
    assert made.weights == num_bytes([*real.parameters(), *real.buffers()])
    assert made.state == num_bytes(state_tensors(real.state(3)))
    past_bytes = usual_past_bytes(shapes(name), 3)  # which lies in pages on a GPU alone
    assert made.kv_cache == usual_kv_bytes(real, 3) + past_bytes


@pytest.mark.slow
@FAMILIES
def test_packed_weights_of_cpu_kernels_are_counted(name):
    kernels.build()
    growth = residual.prepare(zoo.load(directory(name, "tiny"), "cpu", "float32"))
    assert plan(shapes(name), 3, is_for_cpu=True).weights == plan_of_shapes(name).weights + growth


@pytest.mark.slow
@FAMILIES
def test_weights_that_are_kept_in_bf16_are_counted_with_16_bits(name, tmp_path, monkeypatch):
    monkeypatch.setattr("zoo.checkpoint.loading.LEAST_NUMBERS", 1024)
    place = zoo.families()[name].write_demo(tmp_path / name, "tiny", dtype=torch.bfloat16)
    made = plan(zoo.load(place, "meta", "float32", keeps_bf16=True), 3)
    real = zoo.load(place, "cpu", "float32", keeps_bf16=True)
    assert made.weights == num_bytes([*real.parameters(), *real.buffers()])
    assert made.weights < plan_of_shapes(name).weights


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN")
def test_weights_packed_by_a_library_are_counted():
    weight = torch.ones(96, 64)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    assert packed.is_mkldnn and num_bytes([packed, weight, weight[1:]]) == 2 * weight.nbytes


@FAMILIES
def test_a_model_of_shapes_reads_no_weight(name, tmp_path, monkeypatch):
    def read(*_):
        raise AssertionError("a weight is read")

    monkeypatch.setattr("zoo.checkpoint.loading._is_finite", read)
    assert {p.device.type for p in shapes(name).parameters()} == {"meta"}


def test_the_peak_counts_what_exists_at_once():
    with Peak() as peak:
        x = torch.empty(100, device="meta")
        y = x + 1  # 800 bytes
        del x
        z = (y + 1).view(10, 10)  # 800 again, and a view
        del y, z
        torch.empty(150, device="meta")
    assert peak.most == 800 and peak.now == 0


def test_more_slots_need_more_of_all_but_weights():
    few, many = (plan(shapes("qwen3_tts"), slots) for slots in (2, 16))
    assert few.weights == many.weights
    assert few.state < many.state and few.launch < many.launch and few.kv_cache < many.kv_cache


@pytest.mark.parametrize("verb", ["hidden", "render"])
def test_a_prefill_and_a_render_are_in_the_plan(verb, monkeypatch):
    """Both run at the same time."""
    model = shapes("qwen3_tts")
    before, launch = launch_bytes(model, 2), getattr(model, verb)
    more = 1 << 40

    def takes_more(*given):
        made = torch.empty(more, dtype=torch.uint8, device="meta")
        return made, launch(*given)

    monkeypatch.setattr(model, verb, takes_more)
    assert launch_bytes(model, 2) == before + more


def test_kv_memory_is_refused_only_beyond_all_memory_of_a_gpu(monkeypatch):
    """Memory that others use now may be free by the time that it is taken."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000, 2000))
    check_there_is(2000, torch.device("cuda"))
    with pytest.raises(ValueError, match="more than this machine's cuda has: 2000"):
        check_there_is(2001, torch.device("cuda"))


def test_swap_memory_beyond_the_hosts_memory_is_refused(monkeypatch):
    monkeypatch.setattr("compile_cache.limits.memory_bytes", lambda: 2 << 30)
    with pytest.raises(ValueError, match="of swap memory are more than this machine's cpu has: 2147483648"):
        Engine(family("qwen3_tts"), max_slots=1, swap_memory_bytes=(2 << 30) + 1)


@pytest.mark.parametrize(("name", "size"), [("qwen3_tts", "tiny-base"), ("higgs_v3", "tiny")])
def test_encoding_the_longest_reference_is_in_the_plan(name, size):
    """It takes at least its samples, and one layer of channels of them."""
    model = zoo.load(directory(name, size), "meta", "bfloat16")
    made = plan(model, 1)
    longest = int(model.spec.reference_s[1] * model.spec.sample_rate_hz)
    assert made.encoder > 2 * 4 * longest
    assert made.total == made.weights + made.state + made.launch + made.encoder + made.kv_cache
    assert fit([model], made.total, 1) == (1, made.kv_cache)
    with pytest.raises(ValueError, match="these are needed"):
        fit([model], made.total - 1, 1)


@pytest.mark.parametrize("name", ["higgs_v3", "csm", "zonos", "chatterbox"])
def test_the_plan_counts_what_encoding_takes(name):
    """On tensors without memory as on those of a CPU, but for values that the host looks up. What a package of
    others takes differs by more in a tiny model."""
    counted, taken = (_encoder_bytes(made, 4.0) for made in (shapes(name), family(name)))
    assert taken > 4 * 4.0 * family(name).spec.sample_rate_hz
    assert counted == pytest.approx(taken, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cosyvoice2", "step_audio2", "glm4_voice", "chatterbox"])
def test_two_steps_of_a_solver_need_as_much_as_all(name, monkeypatch):
    model = shapes(name)
    two = launch_bytes(model, 1)
    monkeypatch.setattr(f"zoo.{name}.flow.solver_steps", lambda num, like: range(num))
    assert launch_bytes(model, 1) == two


def test_a_model_without_references_needs_no_memory_for_encoders():
    assert plan(shapes("qwen3_tts"), 1).encoder == 0


@pytest.mark.slow
def test_slots_are_as_many_as_fit_the_memory():
    model = shapes("qwen3_tts")
    exact = plan(model, 8)
    assert fit([model], exact.total) == (8, exact.kv_cache)
    slots, kv_memory_bytes = fit([model], exact.total - 1)
    assert slots == 4 and kv_memory_bytes > exact.kv_cache // 2
    assert fit([model], 1 << 40)[0] == SLOTS[0]
    assert fit([model], 1 << 40, max_slots=3)[0] == 3
    with pytest.raises(ValueError, match=r"the device has 1000 bytes to give; with max_slots 1 .*qwen3_tts"):
        fit([model], 1000)


def test_free_gpu_memory_decides_unset_sizes(monkeypatch):
    exact = plan(shapes("qwen3_tts", "bfloat16"), 2)
    models = {"a": str(directory("qwen3_tts", "tiny"))}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    free = int(exact.total / (1 - SPARE_PART)) + 1
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    slots, kv_memory_bytes = sizes(Settings(models))
    assert slots == 2 and 0 <= kv_memory_bytes - exact.kv_cache <= 1
    assert sizes(Settings(models, memory=Memory(1)))[1] > kv_memory_bytes
    assert sizes(Settings(models, memory=Memory(1, 77))) == (1, 77)
    with pytest.raises(ValueError, match="with max_slots 4 these are needed"):
        sizes(Settings(models, memory=Memory(4)))


@pytest.mark.slow
def test_a_small_kv_memory_that_is_given_is_all_that_must_fit(monkeypatch):
    """A larger one than usual does not take slots away."""
    room = plan(shapes("qwen3_tts", "bfloat16"), 4, kv_memory_bytes=77).total
    models = {"a": str(directory("qwen3_tts", "tiny"))}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    free = int(room / (1 - SPARE_PART)) + 1
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    assert sizes(Settings(models, memory=Memory(None, 77))) == (4, 77)
    with pytest.raises(ValueError, match="with max_slots 4 these are needed"):
        sizes(Settings(models, memory=Memory(4)))
    slots, _ = sizes(Settings(models))
    assert sizes(Settings(models, memory=Memory(None, 1 << 40))) == (slots, 1 << 40)


def test_paused_streams_have_five_times_the_kv_cache_and_at_most_a_quarter_of_the_hosts_memory(monkeypatch):
    monkeypatch.setattr("compile_cache.limits.memory_bytes", lambda: 8000)
    assert [usual_swap_bytes(kv_memory_bytes) for kv_memory_bytes in (100, 400, 401)] == [500, 2000, 2000]


def test_sizes_on_a_cpu_need_no_survey():
    models, how = {"a": "nowhere"}, ModelOptions("cpu")
    assert sizes(Settings(models, model=how)) == (8, None)
    assert sizes(Settings(models, model=how, memory=Memory(3, 5))) == (3, 5)


@pytest.mark.slow
def test_several_models_share_the_room():
    models = [shapes("qwen3_tts"), shapes("higgs_v3")]
    both = [plan(model, 4) for model in models]
    slots, kv_memory_bytes = fit(models, sum(one.total for one in both))
    assert slots == 4 and kv_memory_bytes == sum(one.kv_cache for one in both)


@pytest.mark.slow
def test_a_cpu_has_more_slots_for_throughput_as_far_as_its_memory_holds_them(monkeypatch):
    model = {"m": str(directory("qwen3_tts", "tiny"))}

    def slots(policy: Policy, max_slots: int | None = None) -> int:
        how = ModelOptions("cpu")
        return sizes(Settings(model, model=how, memory=Memory(max_slots), latency=Latency(policy)))[0]

    assert (slots("streaming"), slots("fifo"), slots("throughput")) == (8, 8, 64)
    assert slots("throughput", max_slots=3) == 3
    room = plan(shapes("qwen3_tts"), 32).total
    for host, expected in ((room, 32), (room - 1, 16), (1, 8)):
        monkeypatch.setattr("compile_cache.limits.memory_bytes", lambda host=host: round(host / CPU_PART))
        assert slots("throughput") == expected


def test_a_strategy_bounds_the_samples_of_a_recorded_render(monkeypatch):
    toy = family("toy")
    bound = 10 * 25 * toy.spec.frame_samples
    monkeypatch.setattr(toy, "strategy", replace(toy.strategy, render_samples=bound))
    rows = [
        recorded_rows(toy, frames, slots) for frames, slots in ((25, 64), (25, 4), (24, 64), (10_000, 64))
    ]
    assert rows == [10, 4, 10, 1]
